"""DeepSeek V4 over every cut: the same answer at 32 bits, a bounded drift at 16 and 8.

The tiny model has six layers of all kinds. After the prompt the logits are equal to the last bit
for equal chunks, whatever the cut.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from ds4py.config import EngineConfig
from tests.e2e.cuts import Said, coordinator_of, say
from tests.e2e.support import engine
from tests.support import golden
from tests.support.processes import Launcher, run

N_LAYERS = 6
N_TOKENS = 16
N_CTX = 256
CHUNKS = (1, 7, 64, None)


def model(n_slots: int = len(CHUNKS)) -> EngineConfig:
    return engine(golden.path("tiny-a.gguf"), n_slots=n_slots, n_ctx=N_CTX)


def all_cuts(n_spans: int) -> list[list[str]]:
    """Every way to cut the layers into so many spans."""
    inner = combinations(range(1, N_LAYERS), n_spans - 1)
    return [
        [f"{start}-{end - 1}" for start, end in pairwise([0, *ends, N_LAYERS])] for ends in inner
    ]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """130 tokens: past a window of 128, with 32 rows to choose 8 of."""
    ids: list[int] = golden.load_json("prompts.json")["prompts"]["len130"]["ids"]
    return ids


@pytest.fixture(scope="module")
def alone(prompt: list[int]) -> dict[int | None, Said]:
    """What one process says, for every chunk."""
    with coordinator_of(model(), "0-5", []) as whole:
        return {chunk: say(whole, prompt, chunk, N_TOKENS) for chunk in CHUNKS}


def test_one_process_says_what_the_c_engine_said(
    prompt: list[int], alone: dict[int | None, Said]
) -> None:
    recorded = golden.load_npz("logits_a.npz")
    noise = golden.load_json("prompts.json")["prompts"]["len130"]["variants"]["a"]
    for said in alone.values():
        assert said.tokens[: noise["stable_steps"]] == (
            recorded["len130_greedy"][:N_TOKENS][: noise["stable_steps"]].tolist()
        )
        drift = np.sqrt(np.mean((said.logits - recorded["len130_prefill"]) ** 2))
        assert drift < 2 * noise["noise_rms"]


@pytest.mark.parametrize("cuts", [*all_cuts(1), *all_cuts(2), *all_cuts(3)], ids=" ".join)
def test_every_cut_over_workers_says_what_one_process_says(
    cuts: list[str], prompt: list[int], alone: dict[int | None, Said]
) -> None:
    with coordinator_of(model(1), None, cuts) as cluster:
        said = say(cluster, prompt, 64, N_TOKENS)
    assert np.array_equal(said.logits, alone[64].logits)
    assert said.tokens == alone[64].tokens


@pytest.mark.parametrize(
    ("local", "cuts"),
    [
        pytest.param("0-2", ["3-5"], id="own hash-routed layers"),
        pytest.param("0-0", ["1-2", "3-5"], id="hash-routed layers without the embedding"),
        pytest.param("0-3", ["4:5"], id="own head"),
    ],
)
def test_own_layers_and_chunks(
    local: str, cuts: list[str], prompt: list[int], alone: dict[int | None, Said]
) -> None:
    with coordinator_of(model(), local, cuts) as cluster:
        for chunk in CHUNKS:
            said = say(cluster, prompt, chunk, N_TOKENS)
            assert np.array_equal(said.logits, alone[chunk].logits), f"chunk {chunk}"
            assert said.tokens == alone[chunk].tokens, f"chunk {chunk}"


@pytest.mark.parametrize(("bits", "limit"), [(16, 0.1), (8, 0.3)])
def test_narrow_transport_drifts_little(
    bits: int, limit: float, prompt: list[int], alone: dict[int | None, Said]
) -> None:
    """Two cuts, so two roundings; logits have a standard deviation of about 3."""
    with coordinator_of(model(1), None, ["0-1", "2-3", "4-5"], bits=bits) as cluster:
        said = say(cluster, prompt, 64, N_TOKENS)
    exact = alone[64]
    drift = float(np.sqrt(np.mean((said.logits - exact.logits) ** 2)) / exact.logits.std())
    same = next(
        (k for k, (a, b) in enumerate(zip(said.tokens, exact.tokens, strict=True)) if a != b),
        N_TOKENS,
    )
    print(  # noqa: T201 - shown by pytest -rP
        f"{bits} bits: logits drift by {drift:.2%} of their deviation, {same} tokens equal"
    )
    assert 0 < drift < limit


def test_real_processes_say_what_one_process_says(
    prompt: list[int], alone: dict[int | None, Said], tmp_path: Path
) -> None:
    given = ("-m", golden.path("tiny-a.gguf"), "-c", N_CTX, "--precision", "f32")
    asked = ("--prompt-ids", ",".join(map(str, prompt)), "-n", N_TOKENS, "--temp", 0)
    with Launcher(tmp_path) as launch:
        listen = ("--dist-role", "worker", "--dist-listen", "127.0.0.1:0")
        workers = [launch.worker(*listen, "--dist-layers", part, *given) for part in ("2-3", "4-5")]
        said = run(
            *("ds4py-cli", *given, *asked, "--print-ids", "-t", 1, "--dist-layers", "0-1"),
            *("--dist-route", ",".join(worker.address for worker in workers)),
            *("--dist-prefill-chunk", 64),
        )
    assert said.status == 0, said.err
    assert said.ids == alone[64].tokens
