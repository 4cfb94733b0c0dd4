"""Same answer, wherever the cuts are, for every family of plain blocks; see `test_same_text`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.cuts import coordinator_of, say
from tests.e2e.support import engine
from tests.numerics.truths import FAMILIES, path_of
from tests.support.models import gemma3_path

PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 500, 60)]
"""Longer than the window of the toys."""

N_TOKENS = 6


def assert_cuts_say_the_same(path: Path, cuts: list[tuple[str | None, list[str]]], last: int):
    model = engine(path, n_slots=2, n_ctx=128)
    with coordinator_of(model, None, [f"0-{last}"]) as whole:
        alone = {chunk: say(whole, PROMPT, chunk, N_TOKENS) for chunk in (7, None)}
    for local, workers in cuts:
        with coordinator_of(model, local, workers) as cluster:
            for chunk, want in alone.items():
                said = say(cluster, PROMPT, chunk, N_TOKENS)
                assert np.array_equal(said.logits, want.logits), (workers, chunk)
                assert said.tokens == want.tokens, (workers, chunk)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_of_a_toy_says_what_one_process_says(family: str) -> None:
    cuts = [(None, ["0-0", "1-2"]), ("0-0", ["1-1", "2:output"])]
    assert_cuts_say_the_same(path_of(f"{family}-Q4_1"), cuts, last=2)


def test_three_stages_of_gemma_say_what_one_says() -> None:
    assert_cuts_say_the_same(gemma3_path(), [(None, ["0-4", "5-11", "12-17"])], last=17)
