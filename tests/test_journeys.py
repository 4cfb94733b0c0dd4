"""How many modules a prompt's token and an activation pass, counted by watching them go by.

On a token's way a module counts if one of its functions is called with the prompt's words or its
token ids, as an argument or inside one; what does not see them does not count. On an activation's
way every module counts whose functions are called, except for those that only define its values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType, MethodType

import httpx

import ds4py
from ds4py.layer_range import LayerSpec
from tests.clusters import span, start_worker
from tests.e2e.support import coordinator, route, worker
from tests.fake_runner import FakeRunner
from tests.peers import driver, entry
from tests.toys import toy_llama

ROOT = Path(ds4py.__file__).parent
MOST_FOR_A_TOKEN = 34
MOST_FOR_AN_ACTIVATION = 15
RUNNER = "engine/runner"
BELOW = {"models", "layers", "kernels", "quant", "engine"}
VALUES = {"activations", "layer_range"}
WORDS = "zebras juggle quietly"
_DEPTH = 4


class Watch:
    """The modules that see something, in the order in which they do.

    Args:
        sees: Whether a value is, or holds as its own, what travels.
    """

    def __init__(self, sees: Callable[[object], bool]):
        self.passed: list[str] = []
        self._sees = sees
        self._on = False
        self._files: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if not self._on or event != "call":
            return
        name = self._module(frame.f_code.co_filename)
        if name is None or name in self.passed:
            return
        if name == RUNNER:
            self._on = frame.f_code.co_name != "run"  # there
            return
        if any(self._holds(value, _DEPTH) for value in list(frame.f_locals.values())):
            self.passed.append(name)

    def _module(self, file: str) -> str | None:
        if file not in self._files:
            path = Path(file)
            inside = path.is_relative_to(ROOT)
            name = str(path.relative_to(ROOT).with_suffix("")) if inside else None
            below = name is not None and name.split("/")[0] in BELOW and name != RUNNER
            self._files[file] = None if below or name in VALUES else name
        return self._files[file]

    def _holds(self, value: object, depth: int) -> bool:
        if self._sees(value):
            return True
        if not depth or isinstance(value, (type, FunctionType, MethodType, threading.Thread)):
            return False
        if isinstance(value, (list, tuple)):
            return any(self._holds(item, depth - 1) for item in value[:8])
        if isinstance(value, dict):
            return any(self._holds(item, depth - 1) for item in [*value.values()][:8])
        if not type(value).__module__.startswith("ds4py"):
            return False
        return any(self._holds(item, depth - 1) for item in _fields(value))

    def tell(self) -> None:
        """Print what was seen, for `pytest -s`."""
        print(f"{len(self.passed)} modules: {' '.join(self.passed)}")  # noqa: T201

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what threads do that began after `traced`."""
        self._on = True
        try:
            yield
        finally:
            self._on = False


def _fields(value: object) -> list[object]:
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    slots = [getattr(value, name, None) for name in names]
    return [*slots, *getattr(value, "__dict__", {}).values()]


@contextmanager
def traced(sees: Callable[[object], bool]) -> Iterator[Watch]:
    """Watch every thread that begins meanwhile."""
    watch = Watch(sees)
    threading.setprofile(watch)
    try:
        yield watch
    finally:
        threading.setprofile(None)


def test_a_token_of_a_prompt_passes_few_modules(tmp_path: Path) -> None:
    """From the body of the request to the runner of the coordinator's own layers."""
    toy = toy_llama(tmp_path / "m.gguf")
    ids: list[int] = []

    def sees(value: object) -> bool:
        if isinstance(value, str):
            return WORDS in value
        if isinstance(value, (list, tuple)) and ids and len(value) >= len(ids):
            return ids in ([*value[: len(ids)]], [*value[1 : len(ids) + 1]])  # behind a first token
        return isinstance(value, bytes) and WORDS.encode() in value

    own = LayerSpec.parse("0:1")
    with (
        traced(sees) as watch,
        worker(toy, "2:output") as w,
        coordinator(toy, layers=own, route=route(w)) as server,
    ):
        server.wait_ready()
        ids += server.node.text.tokenizer.encode(WORDS, special=False)
        with watch.watching():
            asked = {"prompt": WORDS, "max_tokens": 1}
            url = f"http://{server.address}/v1/completions"
            assert httpx.post(url, json=asked).status_code == 200
    watch.tell()
    assert {"server/requests/queue", "coordinator/session", "stage/stage"} <= {*watch.passed}
    assert len(watch.passed) <= MOST_FOR_A_TOKEN, watch.passed


def test_an_activation_passes_few_modules_of_a_worker() -> None:
    """From the frame of a WORK to the frame of its RESULT, around the runner."""
    with traced(lambda _: True) as watch:
        serving = start_worker(FakeRunner(span("2-5")))
        try:
            with driver(serving.address, entry(span("2-5"))) as d:
                d.check([], [1, 2, 3])
                with watch.watching():
                    d.check([1, 2, 3], [4, 5, 6])
        finally:
            serving.close()
    watch.tell()
    assert {"worker/connection", "stage/stage", "transport/outbox"} <= {*watch.passed}
    assert len(watch.passed) <= MOST_FOR_AN_ACTIVATION, watch.passed
