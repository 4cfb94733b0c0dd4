"""The vocabulary of the tiny DeepSeek V4, and its chat."""

import functools

from ds4py.gguf.file import GgufFile
from ds4py.gguf.kinds import MetaValue
from ds4py.text.chat_formats.deepseek4 import MAX_MIN_CONTEXT, DeepSeek4Chat
from ds4py.text.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.support import golden


@functools.cache
def metadata() -> dict[str, MetaValue]:
    """The file's metadata."""
    with GgufFile.open(golden.path("tiny-a.gguf")) as file:
        return dict(file.metadata)


@functools.cache
def tokenizer() -> Tokenizer:
    """The file's tokenizer."""
    return load_tokenizer(metadata())


def chat(*, spelled_markers: bool = False, n_ctx: int = MAX_MIN_CONTEXT) -> DeepSeek4Chat:
    """Its chat, by default in a context in which every thinking mode is possible."""
    return DeepSeek4Chat(tokenizer(), n_ctx, spelled_markers=spelled_markers)
