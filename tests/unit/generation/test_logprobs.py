"""Log probabilities: the softmax of the whole vocabulary, in float64."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ds4py.generation.logprobs import top_logprobs
from ds4py.generation.sampling import F32

LOGITS = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.floats(-50, 50, width=32)
    | st.sampled_from([0.0, 1.0, -np.inf, np.inf, np.nan])
    | st.sampled_from([np.float32(3.4e38), np.float32(-3.4e38)]),
)


@given(LOGITS, st.integers(0, 128), st.data())
@example(np.full(3, np.nan, np.float32), 2, None)
def test_they_equal_a_plain_sum(logits: F32, k: int, data: st.DataObject | None) -> None:
    chosen = data.draw(st.integers(0, len(logits) - 1)) if data else 0
    finite = {id_: float(x) for id_, x in enumerate(logits) if math.isfinite(x)}
    told = top_logprobs(logits, chosen, k)
    best = max(finite.values(), default=0.0)
    total = math.fsum(math.exp(x - best) for x in finite.values())
    expected = {id_: x - best - math.log(total) for id_, x in finite.items()}
    ranked = sorted(finite, key=lambda id_: (-finite[id_], id_))[:k]
    assert [id_ for id_, _ in told.ranked] == ranked
    for id_, logprob in told.ranked:
        assert logprob == pytest.approx(expected[id_], rel=1e-12, abs=1e-12)
        assert logprob <= 0
    assert told.chosen == pytest.approx(expected.get(chosen, -math.inf), rel=1e-12, abs=1e-12)


def test_equal_ones_are_listed_by_id() -> None:
    told = top_logprobs(np.array([1, 5, 1, 5, 1], np.float32), 2, 4)
    assert [id_ for id_, _ in told.ranked] == [1, 3, 0, 2]


def test_probabilities_of_a_large_vocabulary_add_up_to_one() -> None:
    logits = np.full(200_000, -20, np.float32)  # in float32 their sum would drift
    logits[7] = 0
    told = top_logprobs(logits, 7, 1)
    assert told.ranked == ((7, told.chosen),)
    assert told.chosen == pytest.approx(-math.log1p(199_999 * math.exp(-20)), rel=1e-9)


def test_nothing_is_listed_that_nobody_asked_for_and_the_logits_stay() -> None:
    logits = np.array([1, np.nan, 3], np.float32)
    logits.flags.writeable = False
    assert top_logprobs(logits, 1, 0).ranked == ()
    assert top_logprobs(logits, 1, 5).chosen == -math.inf
