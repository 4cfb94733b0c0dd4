"""`ds4py.LLM`: replies, streams, conversations, routes, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ds4py
from ds4py.config import EngineConfig
from ds4py.engine import open_runner
from ds4py.errors import ClusterError, ConfigError, Ds4Error
from ds4py.layer_range import LayerSpec
from tests.support.clusters import start_worker
from tests.support.processes import free_port
from tests.support.toys import toy_llama


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return toy_llama(tmp_path_factory.mktemp("api") / "m.gguf", n_layers=2, quant="Q8_0", seed=3)


@pytest.fixture(scope="module")
def llm(model):
    with ds4py.LLM(model, device="cpu", threads=1, sessions=2) as opened:
        yield opened


def test_importing_ds4py_loads_nothing_heavy():
    code = (
        "import sys, ds4py; assert ds4py.__version__; assert 'LLM' in dir(ds4py);"
        "assert not {'torch', 'numpy', 'click'} & set(sys.modules), sorted(sys.modules);"
        "ds4py.LLM, ds4py.Generation, ds4py.SamplingParams; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_name_that_is_none_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        ds4py.LMM  # noqa: B018


def test_a_stream_adds_up_to_the_text(llm):
    streamed = list(llm.generate("hello", max_tokens=20))
    whole = llm.generate("hello", max_tokens=20)
    assert "".join(streamed) == whole.text
    assert len(whole.ids) == 20
    assert len(streamed) > 1
    assert (whole.figures.n_generated, whole.figures.finish) == (20, "length")


def test_token_ids_are_a_prompt_too(llm):
    ids = llm.tokenize("hello")
    assert llm.detokenize(ids).endswith("hello")
    by_ids = llm.generate(ids, max_tokens=5).ids
    assert by_ids == llm.generate("hello", max_tokens=5).ids


def test_nothing_is_evaluated_before_a_reply_is_read_and_two_can_be_read_in_turn(llm):
    first, second = (llm.generate(text, max_tokens=4) for text in ("hello", "world"))
    alone = llm.generate("hello", max_tokens=4).text
    assert next(second) is not None
    assert first.text == alone
    second.close()


def test_a_reply_that_is_left_gives_its_session_back(llm):
    for _ in range(5):  # more than there are sessions
        with llm.generate("hello", max_tokens=100) as reply:
            next(reply)
        with pytest.raises(Ds4Error, match="no figures"):
            reply.figures  # noqa: B018


def test_a_stop_string_ends_the_reply(llm):
    whole = llm.generate("hello", max_tokens=30).text
    stop = whole[5:8]
    reply = llm.generate("hello", max_tokens=30, stop=[stop])
    assert reply.text == whole[: whole.index(stop)]
    assert reply.figures.finish == "stop"


def test_sampling_with_a_seed_can_be_repeated(llm):
    def once(seed: int) -> tuple[int, ...]:
        sampling = ds4py.SamplingParams(temperature=1.0, seed=seed)
        return llm.generate("hello", max_tokens=12, sampling=sampling).ids

    assert once(7) == once(7)
    assert once(7) != once(8)


def test_a_chat_is_written_in_the_models_format(llm):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    reply = llm.chat(messages, max_tokens=3)
    written = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    same = llm.generate(written, max_tokens=3)
    assert reply.ids == same.ids
    assert reply.figures.n_prompt == len(llm.tokenize(written))


def test_a_session_goes_on_from_the_exact_tokens(llm):
    session = llm.session(max_tokens=6)
    first = session.ask("hello")
    n_said = first.figures.n_prompt + 6
    assert session.n_tokens == n_said
    second = session.ask("and then?")
    # all but the last sampled token were evaluated
    assert second.figures.n_cached == n_said - 1
    session.clear()
    assert session.n_tokens == 0
    assert session.ask("hello").ids == first.ids


def test_a_reply_that_is_closed_early_counts_as_said(llm):
    session = llm.session(max_tokens=50)
    reply = session.ask("hello")
    pieces = reply.pieces()
    ids = [token for _ in range(3) for token in next(pieces).ids]
    reply.close()
    said = session.n_tokens
    second = session.ask("why?")
    assert second.figures.n_cached == said - 1  # the token sampled last was not evaluated
    assert second.figures.n_prompt > said > len(ids) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": "0-1"}, "layers: only with a route"),
        ({"route": ["nowhere"]}, "nowhere"),
        ({"n_ctx": 10**6}, "the model was trained for 256 tokens"),
        ({"kv_budget": "much"}, "size 'much'"),
        ({"device": "tpu"}, "device 'tpu'"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        ds4py.LLM(model, threads=1, **arguments)


def test_an_empty_prompt_and_an_empty_conversation_are_refused(llm):
    with pytest.raises(ConfigError, match="expected at least one"):
        llm.generate([])
    with pytest.raises(ConfigError, match="expected at least one message"):
        llm.chat([])


def test_over_a_route_the_answer_is_the_same(model, llm):
    config = EngineConfig(model=model, device="cpu", threads=1)
    runners = [open_runner(config, LayerSpec.parse(layers)) for layers in ("0-0", "1-1")]
    workers = [start_worker(runner) for runner in runners]
    try:
        route = [f"127.0.0.1:{worker.address.port}" for worker in workers]
        with ds4py.LLM(model, route=route, device="cpu", threads=1) as routed:
            got = routed.generate("hello", max_tokens=12).ids
        with ds4py.LLM(model, route=route[1:], layers="0-0", device="cpu", threads=1) as mixed:
            assert mixed.generate("hello", max_tokens=12).ids == got
        assert llm.generate("hello", max_tokens=12).ids == got
    finally:
        for worker in workers:
            worker.close()


def test_a_route_that_does_not_come_is_named(model):
    with pytest.raises(ClusterError, match=r"not complete within 0\.3 s: nobody serves"):
        ds4py.LLM(model, route=[f"127.0.0.1:{free_port()}"], threads=1, connect_seconds=0.3)
