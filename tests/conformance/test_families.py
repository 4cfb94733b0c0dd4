"""Toy files of every family of plain blocks against the logits that transformers gives for them.

The logits were recorded by `tools/make_family_golden.py`, at every fourth position. In float32 the
two programs differ by the order of sums: 1e-6 of the spread is measured. In bfloat16 a choice of
experts may fall otherwise, so only dense families are compared.
"""

from __future__ import annotations

import numpy as np
import pytest

from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from tests.support.golden import load_npz
from tools.make_family_golden import SIZES, TOKENS, write

TOLERANCE = {"f32": 1e-5, "bf16": 0.03}
RUNS = [("f32", family) for family in SIZES] + [
    ("bf16", family) for family, sizes in SIZES.items() if not sizes.n_expert
]


def logits(runner: LocalRunner, start: int, end: int) -> np.ndarray:
    work = ForwardRequest(
        session=SessionId(1),
        tokens=tuple(TOKENS[start:end]),
        pos0=start,
        hidden=None,
        output_kind=OutputKind.LOGITS,
    )
    (answer,) = runner.run([work])
    assert isinstance(answer, ForwardOutput), answer
    assert answer.logits is not None
    return answer.logits


@pytest.mark.parametrize(("precision", "family"), RUNS)
def test_logits_equal_those_of_transformers(tmp_path, precision, family):
    path = write(tmp_path / "m.gguf", family)
    config = EngineConfig(
        model=path, precision=precision, device="cpu", threads=1, n_slots=1, n_ctx=64
    )
    runner, start = open_runner(config), 0
    expected = load_npz("families_logits.npz")[family]
    for position, want in zip(range(0, len(TOKENS), 4), expected, strict=True):
        # a single token first, then chunks of four, the last of which end behind every window
        got = logits(runner, start, position + 1)
        start = position + 1
        assert np.abs(got - want).max() < TOLERANCE[precision] * np.ptp(want), position
