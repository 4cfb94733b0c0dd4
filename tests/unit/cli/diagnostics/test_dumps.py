"""The three dumps: ds4's form to the byte, and numbers that the model itself gives."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from ds4py.cli.diagnostics.dumps import (
    DumpRun,
    _number,
    _token,
    dump_logits,
    dump_logprobs,
    token_lines,
)
from ds4py.config import CoordinatorConfig
from ds4py.runtime import Node, open_node
from ds4py.text.tokenizer.tokenizer import load_tokenizer
from tests.e2e.support import SOCKETS, engine
from tests.support.toys import bpe_metadata, toy_llama

PROMPT = (5, 80, 3, 41, 9, 77)
TOKENIZER = load_tokenizer(bpe_metadata())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    path = toy_llama(tmp_path_factory.mktemp("model") / "toy.gguf", n_layers=2)
    with open_node(engine(path), CoordinatorConfig(n_sessions=1), SOCKETS, whole=True) as opened:
        yield opened


def run(node: Node, *, cancelled: bool = False) -> DumpRun:
    return DumpRun(node=node, prompt=PROMPT, cancelled=lambda: cancelled, progress=lambda *_: None)


def logits_after(node: Node, tokens: Sequence[int]) -> np.ndarray:
    with node.backend.lease(tokens) as session:
        return session.sync(tokens).logits


def test_tokens_are_a_list_and_a_line_each() -> None:
    ids = TOKENIZER.encode("hello é\n🤔<|im_end|>", special=True)
    lines = list(token_lines(TOKENIZER, ids))
    assert lines[0] == f"[{', '.join(map(str, ids))}]"
    assert lines[1] == f"{ids[0]:>6}  hello"
    pieces = [line[8:] for line in lines[1:]]
    assert [int(line[:6]) for line in lines[1:]] == ids
    assert "\\n" in pieces
    assert pieces[-1] == "<|im_end|>"
    assert pieces[-5:-1] == ["\\xf0", "\\x9f", "\\xa4", "\\x94"]


def test_logits_come_back_as_they_were_eight_to_a_line(node: Node) -> None:
    out = io.StringIO()
    assert dump_logits(run(node), out, model="m/é.gguf", backend="cpu")
    expected = logits_after(node, PROMPT)
    told = json.loads(out.getvalue())
    assert np.array_equal(np.array(told.pop("logits"), np.float32), expected)
    best = int(expected.argmax())
    assert told == {
        "source": "ds4py",
        "model": "m/é.gguf",
        "backend": "cpu",
        "quant_bits": 4,
        "prompt_tokens": 6,
        "ctx": 256,
        "vocab": 279,
        "argmax_token": json.loads(_token(node.text.tokenizer, best)),
        "argmax_logit": pytest.approx(float(expected[best]), rel=1e-8),
    }
    rows = out.getvalue().split('"logits":[\n')[1].splitlines()[:-1]
    assert {row.rstrip(",").count(",") + 1 for row in rows[:-1]} == {8}
    assert rows[-1].count(",") + 1 == 279 % 8


def test_logprobs_are_those_of_the_greedy_answer_over_the_whole_vocabulary(node: Node) -> None:
    out = io.StringIO()
    assert dump_logprobs(run(node), out, top_k=5, max_tokens=4)
    told = json.loads(out.getvalue())
    steps = told.pop("steps")
    assert told == {"source": "ds4py", "prompt_tokens": 6, "ctx": 256, "top_k": 5}
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    tokens = list(PROMPT)
    for step in steps:
        logits = logits_after(node, tokens).astype(np.float64)
        logprobs = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        listed = step["top_logprobs"]
        assert len(listed) == 5
        assert listed[0]["token"] == step["selected"]
        for entry in listed:
            token = entry["token"]["id"]
            assert entry["logprob"] == pytest.approx(logprobs[token], abs=1e-5)
            assert entry["logit"] == pytest.approx(logits[token], abs=1e-5)
            assert entry["logprob"] <= 0
        assert [e["logit"] for e in listed] == sorted((e["logit"] for e in listed), reverse=True)
        tokens.append(step["selected"]["id"])


def test_the_step_that_ends_the_answer_is_listed(node: Node, monkeypatch) -> None:
    first = int(logits_after(node, PROMPT).argmax())
    monkeypatch.setattr(node.text.tokenizer, "eos_ids", frozenset({first}))
    out = io.StringIO()
    assert dump_logprobs(run(node), out, top_k=1, max_tokens=None)
    (step,) = json.loads(out.getvalue())["steps"]
    assert step["selected"]["id"] == first


def test_an_interrupted_dump_is_still_json(node: Node) -> None:
    out = io.StringIO()
    assert not dump_logprobs(run(node, cancelled=True), out, top_k=5, max_tokens=4)
    assert json.loads(out.getvalue())["steps"] == []


def test_the_bytes_of_every_token_are_told() -> None:
    for token in range(279):
        raw = TOKENIZER.token_bytes(token, special=True)
        spelled = _token(TOKENIZER, token)
        told = json.loads(spelled)
        assert bytes(told["bytes"]) == raw
        try:
            assert told["text"] == raw.decode()
        except UnicodeDecodeError:
            assert told["text"] == raw.decode("latin-1")
            assert f"\\u00{raw[0]:02x}" in spelled


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.25), "0.25"),
        (np.float32(21.7416534), "21.7416534"),
        (np.float32(-1e-20), "-9.99999968e-21"),
        (float("nan"), "null"),
        (float("-inf"), "null"),
    ],
)
def test_numbers_have_nine_digits_and_no_infinity(value: float, text: str) -> None:
    assert _number(value) == text
    assert json.loads(text) == json.loads(_number(value))
