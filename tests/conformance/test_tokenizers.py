"""Token ids of real vocabularies equal those of other implementations."""

import itertools
import json
from typing import Any

import numpy as np
import pytest

from ds4py.gguf.file import GgufFile
from ds4py.gguf.kinds import MetaValue
from ds4py.text.chat_formats.template import ChatTemplate
from ds4py.text.tokenizer.bpe import BYTE_ALPHABET
from ds4py.text.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests import golden
from tests.models import gemma3_path, smollm2_path

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BAR = "\uff5c"
PATHS = {"smollm2": smollm2_path, "gemma3": gemma3_path}


def load(name: str) -> Any:
    return json.loads(golden.path(name).read_text())


@pytest.fixture(scope="module", params=list(PATHS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Tokenizer:
    with GgufFile.open(PATHS[name]()) as file:
        return load_tokenizer(file.metadata)


def test_texts_have_the_ids_on_which_others_agree(name: str, tokenizer: Tokenizer) -> None:
    cases = load(f"real-models/{name}-tokens.json")["agree"]
    assert len(cases) > 50
    for case in cases:
        assert tokenizer.encode(case["text"], special=True) == case["ids"], case


def test_ids_decode_to_the_texts(name: str, tokenizer: Tokenizer) -> None:
    for case in load(f"real-models/{name}-tokens.json")["agree"]:
        assert tokenizer.decode(case["ids"], special=True).decode() == case["text"]


def test_where_others_disagree_the_models_own_rule_counts(name: str, tokenizer: Tokenizer) -> None:
    for case in load(f"real-models/{name}-tokens.json")["disagree"]:
        # numerals stand alone in SmolLM2; the other text was unescaped on its way to llama.cpp
        right = "llama_cpp" if case["text"].startswith("½") else "transformers"
        assert tokenizer.encode(case["text"], special=True) == case[right], case


def test_prompts_have_the_recorded_ids_bos_included(name: str, tokenizer: Tokenizer) -> None:
    cases = load(f"real-models/{name}-greedy.json")
    assert len(cases) == 8
    for case in cases:
        assert tokenizer.prompt_ids(case["prompt"]) == case["ids"], case["prompt"]


def test_replies_decode_to_the_recorded_text(name: str, tokenizer: Tokenizer) -> None:
    for case in load(f"real-models/{name}-greedy.json"):
        assert tokenizer.decode(case["greedy"], special=True).decode() == case["text"]


def test_the_real_chat_template_opens_the_assistants_turn() -> None:
    with GgufFile.open(smollm2_path()) as file:
        tokenizer = load_tokenizer(file.metadata)
        chat = ChatTemplate.from_metadata(file.metadata, tokenizer)
    text = chat.render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = chat.render_ids([{"role": "user", "content": "Hi"}])
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert tokenizer.eos_ids >= {2}


def deepseek4_metadata() -> dict[str, MetaValue]:
    """The tiny DeepSeek V4 vocabulary, rebuilt from the recorded bytes of its tokens.

    Merged tokens stand in order of rank, so the merge that makes a token is what the merges before
    it leave of its characters.
    """
    to_character = {byte: character for character, byte in BYTE_ALPHABET.items()}
    tokens, types, ranks = [], [], dict[tuple[str, str], int]()
    special = set(load("tokens.json")["special_ids"].values())
    for id_, spelled in enumerate(load("tokens.json")["token_bytes_hex"]):
        content = bytes.fromhex(spelled)
        marker = BAR.encode() in content or id_ in special
        spelling = content.decode() if marker else "".join(to_character[b] for b in content)
        if not marker and len(spelling) > 1:
            ranks[split_in_two(spelling, ranks)] = len(ranks)
        user_defined = "think>" in spelling or spelling == f"{BAR}DSML{BAR}"
        tokens.append(spelling)
        types.append((USER_DEFINED if user_defined else CONTROL) if marker else NORMAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in ranks],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def split_in_two(spelling: str, ranks: dict[tuple[str, str], int]) -> tuple[str, str]:
    parts = list(spelling)
    while len(parts) > 2:
        pairs = list(itertools.pairwise(parts))
        k = min(range(len(pairs)), key=lambda n: ranks.get(pairs[n], len(ranks)))
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
    return parts[0], parts[1]


@pytest.fixture(scope="module")
def deepseek4() -> Tokenizer:
    return load_tokenizer(deepseek4_metadata())


def test_deepseek_4_has_the_recorded_ids(deepseek4: Tokenizer) -> None:
    recorded = load("tokens.json")
    for case in recorded["text"]:
        assert deepseek4.encode(case["text"], special=False) == case["ids"], case
    for case in recorded["rendered_chat"]:
        assert deepseek4.encode(case["text"], special=True) == case["ids"], case
    for case in recorded["chat_prompts"]:
        if case["rendered_ids_equal"]:
            assert deepseek4.encode(case["rendered"], special=True) == case["ids"], case


def test_deepseek_4_tokens_have_the_recorded_bytes(deepseek4: Tokenizer) -> None:
    for id_, spelled in enumerate(load("tokens.json")["token_bytes_hex"]):
        assert deepseek4.token_bytes(id_, special=True).hex() == spelled
