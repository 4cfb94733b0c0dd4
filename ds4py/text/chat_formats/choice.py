"""Which chat format a model has.

Owns: the choice between a format of ours and the template of a file. Refuses to know: the formats.
Invariant: every file that has a tokenizer has a chat format.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds4py.gguf.kinds import MetaValue
from ds4py.text.chat_formats.deepseek4 import DeepSeek4Chat
from ds4py.text.chat_formats.template import ChatFormat, ChatTemplate
from ds4py.text.tokenizer.deepseek4_tokens import ARCHITECTURE
from ds4py.text.tokenizer.tokenizer import Tokenizer


def chat_for(metadata: Mapping[str, MetaValue], tokenizer: Tokenizer, n_ctx: int) -> ChatFormat:
    """Return the chat format of a GGUF file.

    Args:
        metadata: The file's.
        tokenizer: Built from the same metadata.
        n_ctx: Context size in tokens.

    Raises:
        ModelError: The metadata contradicts itself.
    """
    if metadata.get("general.architecture") == ARCHITECTURE:
        return DeepSeek4Chat(tokenizer, n_ctx)
    return ChatTemplate.from_metadata(metadata, tokenizer)
