"""The sampler draws the reference implementation's tokens: golden sampler.json."""

import json
from typing import Any

import numpy as np
import pytest

from ds4py.config import SamplingParams
from ds4py.generation.sampling import Sampler, XorShift64Star
from tests.support import golden


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(golden.path("sampler.json").read_text())
    return found


@pytest.mark.parametrize("number", range(4))
def test_the_random_stream_is_the_recorded_one(number: int) -> None:
    stream = load()["random_stream"][number]
    random = XorShift64Star(int(stream["seed"]))
    assert [random.next_u64() for _ in stream["u64"]] == [int(x, 16) for x in stream["u64"]]
    units = stream.get("unit_f32") or stream["f32_of_second_stream_same_seed"]
    random = XorShift64Star(int(stream["seed"]))
    assert [float(random.uniform()) for _ in units] == units


def test_all_recorded_cases_draw_the_same_tokens_and_end_in_the_same_state() -> None:
    rows = np.load(golden.path("sampler_logits.npz"))["logits"]
    cases = load()["cases"]
    assert len(cases) == 336
    for case in cases:
        names = ("temperature", "top_k", "top_p", "min_p")
        params = SamplingParams(**{name: case[name] for name in names})
        sampler = Sampler(params, state=int(case["seed"]))
        ids = [sampler.pick(rows[case["logits_row"]]) for _ in case["ids"]]
        found = (ids, sampler.state)
        assert found == (case["ids"], int(case["state_after"], 16)), case
