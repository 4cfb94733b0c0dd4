"""Same answer, wherever the cuts are: SmolLM2 in float32 over 32-bit transport.

After the prompt the logits are equal to the last bit for equal chunks, whatever the cut; the greedy
tokens are equal for all chunks as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from ds4py.cluster.coordinator import Coordinator
from ds4py.cluster.session import ClusterSession
from ds4py.cluster.worker import Worker
from ds4py.config import CoordinatorConfig, PrefillTuning, WorkerConfig
from ds4py.contracts import SessionId
from ds4py.engine.open import open_runner, read_model
from ds4py.hidden import F32
from ds4py.runtime import load_text
from ds4py.spans import LayerSpec
from tests.e2e.support import ANY_PORT, SOCKETS, engine, route
from tests.models import smollm2_path
from tests.processes import Launcher, run, wait_for

QUESTION = (
    "A farmer has seventeen sheep and three dogs. One morning the gate is open: nine sheep have "
    "gone up the hill and one dog has followed them. Write a long story about the day on which "
    "he looks for them."
)
N_TOKENS = 16
N_CTX = 256
CHUNKS = (1, 7, 64, None)
CUTS = [
    pytest.param(None, ["0-29"], id="one worker"),
    pytest.param(None, ["0-14", "15-29"], id="two workers"),
    pytest.param(None, ["0-0", "1-28", "29-29"], id="one-layer slices at head and tail"),
    pytest.param("0-13", ["14-14", "15:output"], id="own layers, a one-layer slice behind them"),
    pytest.param("0-0", ["1-29"], id="one own layer, one worker"),
    pytest.param("0-14", ["15:29"], id="own layers and the own head, one worker without head"),
]


@dataclass(frozen=True)
class Said:
    """What a model says after the prompt.

    Args:
        logits: `f32[V]` after the prompt.
        tokens: Greedy continuation.
    """

    logits: F32
    tokens: list[int]


def say(coordinator: Coordinator, prompt: list[int], chunk: int | None) -> Said:
    """Evaluate the prompt in chunks and continue greedily, in a session of its own."""
    config = replace(coordinator.config, prefill=PrefillTuning(chunk=chunk))
    session = ClusterSession(SessionId(1 + (chunk or 0)), coordinator, config)
    logits = session.sync(prompt).logits
    said = Said(logits.copy(), [])
    for _ in range(N_TOKENS):
        said.tokens.append(int(np.argmax(logits)))
        logits = session.eval(said.tokens[-1])
    return said


@contextmanager
def coordinator_of(local: str | None, cuts: list[str]) -> Iterator[Coordinator]:
    """A coordinator with own layers or none, and its workers, over loopback."""
    model = engine(smollm2_path(), n_slots=len(CHUNKS), n_ctx=N_CTX)
    card, n_ctx = read_model(model)
    with ExitStack() as stack:
        workers = []
        for layers in map(LayerSpec.parse, cuts):
            config = WorkerConfig(layers=layers, listen=ANY_PORT)
            workers.append(Worker(open_runner(model, layers), config, SOCKETS))
            workers[-1].start()
            stack.callback(workers[-1].close)
        own = None
        if local is not None:
            own = open_runner(model, LayerSpec.parse(local), want_head=True)
        config_ = CoordinatorConfig(route=route(*workers), result_timeout=60)
        built = Coordinator(card, n_ctx, config_, SOCKETS, local=own)
        stack.callback(built.close)
        built.start()
        wait_for(lambda: built.health().ready, "the route is complete")
        yield built


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """More tokens than the chunk of 64."""
    ids = load_text(engine(smollm2_path())).chat.render_ids([{"role": "user", "content": QUESTION}])
    assert 70 <= len(ids) <= 90, len(ids)
    return ids


@pytest.fixture(scope="module")
def alone(prompt: list[int]) -> dict[int | None, Said]:
    """What one process says, for every chunk."""
    with coordinator_of("0-29", []) as whole:
        return {chunk: say(whole, prompt, chunk) for chunk in CHUNKS}


def test_chunks_do_not_change_the_tokens_of_one_process(alone: dict[int | None, Said]) -> None:
    tokens = [alone[chunk].tokens for chunk in CHUNKS]
    assert tokens == [tokens[0]] * len(CHUNKS)
    assert len(set(tokens[0])) > N_TOKENS // 2  # a text, not one token again and again
    assert 2 not in tokens[0]  # and not its end, which real programs would not show


@pytest.mark.parametrize(("local", "cuts"), CUTS)
def test_every_cut_and_chunk_says_what_one_process_says(
    local: str | None, cuts: list[str], prompt: list[int], alone: dict[int | None, Said]
) -> None:
    with coordinator_of(local, cuts) as cluster:
        for chunk in CHUNKS:
            said = say(cluster, prompt, chunk)
            assert np.array_equal(said.logits, alone[chunk].logits), f"chunk {chunk}"
            assert said.tokens == alone[chunk].tokens, f"chunk {chunk}"


def test_real_processes_say_what_one_process_says(
    prompt: list[int], alone: dict[int | None, Said], tmp_path: Path
) -> None:
    """Three programs, then two of which one owns layers, the tail worker being the same."""
    model = ("-m", smollm2_path(), "-c", N_CTX, "--precision", "f32")
    asked = ("--prompt-ids", ",".join(map(str, prompt)), "-n", N_TOKENS, "--temp", 0)
    tokens = alone[None].tokens
    with Launcher(tmp_path) as launch:
        listen = ("--dist-role", "worker", "--dist-listen", "127.0.0.1:0")
        tail = launch.worker(*listen, "--dist-layers", "15-29", *model)
        head = launch.worker(*listen, "--dist-layers", "0-14", *model)
        server = launch.server(
            *("--dist-role", "coordinator", "--dist-listen", "127.0.0.1:0", *model),
            *("--dist-route", f"{head.address},{tail.address}", "--dist-prefill-chunk", 7),
        )
        server.wait_ready()
        three = run("ds4py-cli", "--host", server.address, *asked)
        assert three.status == 0, three.err
        text = load_text(engine(smollm2_path())).tokenizer.decode(tokens)
        assert three.out.removesuffix(b"\n") == text

        two = run(
            *("ds4py-cli", *model, *asked, "--print-ids", "-t", 1, "--dist-layers", "0-14"),
            *("--dist-route", tail.address, "--dist-prefill-chunk", 64),
        )
        assert two.status == 0, two.err
        assert two.ids == tokens
