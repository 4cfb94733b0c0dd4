"""`--ds4-compat-sampling`: while the model reasons, what a request says of sampling is ignored."""

import pytest

from tests.conformance.server.peer import CHAT, COMPLETIONS, asking, model, post, served

DS4 = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.05, "seed": 7}
OTHER = {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.9, "seed": 7}


def sampled(path, *, compat, **members):
    """The tokens that a model without a script says."""
    with served(model(None), compat_sampling=compat) as (_, port):
        body = asking(path, max_tokens=12, return_token_ids=True, **members)
        return post(port, path, body).json["choices"][0]["token_ids"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_reasoning_model_is_sampled_as_by_ds4_with_the_seed_of_the_request(path):
    wanted = sampled(path, compat=False, **DS4)
    assert sampled(path, compat=True, **OTHER) == wanted
    assert sampled(path, compat=True, **OTHER | {"seed": 8}) != wanted


def test_without_the_switch_the_request_has_its_way():
    assert sampled(CHAT, compat=False, **OTHER) != sampled(CHAT, compat=False, **DS4)


def test_without_reasoning_the_request_has_its_way():
    greedy = sampled(CHAT, compat=False, think=False, **OTHER)
    assert sampled(CHAT, compat=True, think=False, **OTHER) == greedy
    assert sampled(CHAT, compat=True, think=False, **DS4) != greedy
