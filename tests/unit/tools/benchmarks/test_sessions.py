"""Rates of many sessions and pauses beside a prompt, measured on real workers of a toy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds4py.layer_range import balanced_cuts
from tests.toys import toy_llama
from tools.benchmarks.processes import RouteUnderTest, WorkerSettings, route
from tools.benchmarks.sessions import Pauses, decode_rate, pauses_beside_prompt
from tools.benchmarks.timers import DECODE_CONTEXT

CHUNK = 16


@pytest.fixture(scope="module")
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouteUnderTest]:
    """Two workers that hold three sessions, batching switched off by the environment."""
    model = toy_llama(tmp_path_factory.mktemp("toy") / "toy.gguf", n_layers=2)
    settings = WorkerSettings(n_ctx=256, n_sessions=3, batching=False)
    with route(model, balanced_cuts([1, 1], 2), settings, chunk=CHUNK) as started:
        yield started


def evaluated(under_test: RouteUnderTest) -> tuple[int, int]:
    """Tokens of the last worker: in prefill, in decode."""
    stage = under_test.backend.health().stages[-1]
    return stage.prefill_tokens, stage.decode_tokens


def test_every_session_decodes_its_own_tokens(under_test: RouteUnderTest) -> None:
    prefill, decode = evaluated(under_test)
    assert decode_rate(under_test.backend, 3, 5) > 0
    assert evaluated(under_test) == (prefill + 3 * DECODE_CONTEXT, decode + 15)


def test_a_decode_goes_on_while_a_prompt_comes_in(under_test: RouteUnderTest) -> None:
    prefill, decode = evaluated(under_test)
    pauses = pauses_beside_prompt(under_test.backend, 200, CHUNK)
    prompts = DECODE_CONTEXT + 200 + CHUNK  # its last chunk once more, to time it
    assert evaluated(under_test) == (prefill + prompts, decode + 32 + pauses.n_tokens)
    assert pauses.worst > 0
    assert pauses.chunk > 0
    assert pauses.n_tokens >= 1


def test_a_pause_counts_in_chunks_beyond_the_usual_one() -> None:
    assert Pauses(alone=0.01, worst=0.26, chunk=0.5, n_tokens=9).chunks == pytest.approx(0.5)


def test_batching_is_switched_off_by_the_environment_and_on_by_default() -> None:
    assert WorkerSettings(n_ctx=1).prefix == []
    assert WorkerSettings(n_ctx=1, batching=False).prefix == ["env", "DS4_DIST_DISABLE_BATCHING=1"]
