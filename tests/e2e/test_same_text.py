"""Same answer, wherever the cuts are: SmolLM2 in float32 over 32-bit transport.

After the prompt the logits are equal to the last bit for equal chunks, whatever the cut; the greedy
tokens are equal for all chunks as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds4py.config import EngineConfig
from ds4py.runtime import load_text
from tests.e2e.cuts import Said, coordinator_of, say
from tests.e2e.support import engine
from tests.support.models import smollm2_path
from tests.support.processes import Launcher, run

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


def model() -> EngineConfig:
    return engine(smollm2_path(), n_slots=len(CHUNKS), n_ctx=N_CTX)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """More tokens than the chunk of 64."""
    ids = load_text(engine(smollm2_path())).chat.render_ids([{"role": "user", "content": QUESTION}])
    assert 70 <= len(ids) <= 90, len(ids)
    return ids


@pytest.fixture(scope="module")
def alone(prompt: list[int]) -> dict[int | None, Said]:
    """What one process says, for every chunk."""
    with coordinator_of(model(), "0-29", []) as whole:
        return {chunk: say(whole, prompt, chunk, N_TOKENS) for chunk in CHUNKS}


def test_chunks_do_not_change_the_tokens_of_one_process(alone: dict[int | None, Said]) -> None:
    tokens = [alone[chunk].tokens for chunk in CHUNKS]
    assert tokens == [tokens[0]] * len(CHUNKS)
    assert len(set(tokens[0])) > N_TOKENS // 2  # a text, not one token again and again
    assert 2 not in tokens[0]  # and not its end, which real programs would not show


@pytest.mark.parametrize(("local", "cuts"), CUTS)
def test_every_cut_and_chunk_says_what_one_process_says(
    local: str | None, cuts: list[str], prompt: list[int], alone: dict[int | None, Said]
) -> None:
    with coordinator_of(model(), local, cuts) as cluster:
        for chunk in CHUNKS:
            said = say(cluster, prompt, chunk, N_TOKENS)
            assert np.array_equal(said.logits, alone[chunk].logits), f"chunk {chunk}"
            assert said.tokens == alone[chunk].tokens, f"chunk {chunk}"


def test_real_processes_say_what_one_process_says(
    prompt: list[int], alone: dict[int | None, Said], tmp_path: Path
) -> None:
    """Three programs, then two of which one owns layers, the tail worker being the same."""
    given = ("-m", smollm2_path(), "-c", N_CTX, "--precision", "f32")
    asked = ("--prompt-ids", ",".join(map(str, prompt)), "-n", N_TOKENS, "--temp", 0)
    tokens = alone[None].tokens
    with Launcher(tmp_path) as launch:
        listen = ("--dist-role", "worker", "--dist-listen", "127.0.0.1:0")
        tail = launch.worker(*listen, "--dist-layers", "15-29", *given)
        head = launch.worker(*listen, "--dist-layers", "0-14", *given)
        server = launch.server(
            *("--dist-role", "coordinator", "--dist-listen", "127.0.0.1:0", *given),
            *("--dist-route", f"{head.address},{tail.address}", "--dist-prefill-chunk", 7),
        )
        server.wait_ready()
        three = run("ds4py-cli", "--host", server.address, *asked)
        assert three.status == 0, three.err
        text = load_text(engine(smollm2_path())).tokenizer.decode(tokens)
        assert three.out.removesuffix(b"\n") == text

        two = run(
            *("ds4py-cli", *given, *asked, "--print-ids", "-t", 1, "--dist-layers", "0-14"),
            *("--dist-route", tail.address, "--dist-prefill-chunk", 64),
        )
        assert two.status == 0, two.err
        assert two.ids == tokens
