"""A worker of the fake model as a program of its own, so that real signals hit it at a chosen span.

    python -m tests.e2e.fake_stage LAYERS PORT [COORDINATOR]

Orders come on stdin, a line each, and what happens is told on stdout:

- `hold POS`: stand still before the next span at that position; `held POS` is said when it is there
- `go`: go on, and do not stand still any more
- `refuse POS`: answer the next span at that position with an error; `refused POS`
- `forget`: lose every session, as if it had started again; `forgot`
- `report`: `reported`, after all that happened before
- the end of stdin ends the program

`ready PORT` is said at the start and `ran POS N_TOKENS` after each span.
"""

from __future__ import annotations

import sys
import threading

from ds4py.config import Address
from ds4py.contracts import ForwardOutput, ForwardRequest
from ds4py.errors import ModelError
from ds4py.stage.executor import wait_for
from ds4py.worker import worker as worker_module
from ds4py.worker.worker import Worker
from tests.clusters import span, start_worker
from tests.fake_runner import FakeRunner


def say(word: str, *numbers: int) -> None:
    sys.stdout.write(" ".join([word, *map(str, numbers)]) + "\n")
    sys.stdout.flush()


class Obedient(FakeRunner):
    """Does as stdin says."""

    def __init__(self, layers: str):
        super().__init__(span(layers), n_slots=4, before=self._obey)
        self._hold_at: int | None = None
        self._refuse_at: int | None = None
        self._go = threading.Event()

    def order(self, word: str, *numbers: str) -> None:
        match word:
            case "hold":
                self._go.clear()
                self._hold_at = int(numbers[0])
            case "refuse":
                self._refuse_at = int(numbers[0])
            case "report":
                say("reported")
            case "go":
                self._hold_at = None
                self._go.set()

    def _obey(self, work: ForwardRequest) -> None:
        if work.pos0 == self._hold_at:
            self._hold_at = None
            say("held", work.pos0)
            self._go.wait()
        if work.pos0 == self._refuse_at:
            self._refuse_at = None
            say("refused", work.pos0)
            raise ModelError("this span", got="an order to refuse it", expected="none")

    def _run(self, work: ForwardRequest) -> ForwardOutput:
        output = super()._run(work)
        say("ran", work.pos0, len(work.tokens))
        return output


def main(layers: str, port: str, coordinator: str | None = None) -> None:
    worker_module.RECONNECT_PAUSE = 0.05
    runner = Obedient(layers)
    worker = start_worker(
        runner,
        listen=Address("127.0.0.1", int(port)),
        coordinator=None if coordinator is None else Address.parse(coordinator),
    )
    say("ready", worker.address.port)
    for line in sys.stdin:
        if line.strip() == "forget":
            forget(worker)
        else:
            runner.order(*line.split())
    worker.close()


def forget(worker: Worker) -> None:
    for session in list(worker.stage.sessions._sessions):
        worker.stage.end(session)
    wait_for(worker.stage.device.ask(lambda runner: say("forgot")), 20)


if __name__ == "__main__":
    main(*sys.argv[1:])
