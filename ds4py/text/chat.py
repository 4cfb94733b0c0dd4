"""Messages to prompt: the chat template of a GGUF file, or a plain format in its place.

Owns: what a template gets to see, what happens when it is missing or fails, and BOS. Refuses to
know: HTTP, sessions, and how templates are run within limits (`sandbox`). Invariant: every list of
messages gives a prompt or a `RequestError`; a bad template never stops the server.

The fallback is ChatML when the vocabulary has `<|im_start|>` and `<|im_end|>`, otherwise lines of
`role: text`. It is used for every prompt if the template is missing or does not compile, and for a
single prompt if the template fails on it (but not if it refuses the messages by its own words).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from ds4py.errors import RequestError
from ds4py.gguf.kinds import MetaValue
from ds4py.gguf.metadata import Metadata
from ds4py.text.sandbox import BoundedTemplate, TemplateFailedError, TemplateRefusalError
from ds4py.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Message = Mapping[str, object]
"""One message as clients send it: `role`, `content`, and whatever else a template may know."""


class Chat(Protocol):
    """How one model wants conversations written; safe to use from several threads."""

    def render_ids(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Return the prompt of a conversation as token ids.

        Args:
            messages: In order.
            add_generation_prompt: End with the opening of the assistant's turn.
            variables: What else the model's format may know, such as `tools`.

        Raises:
            RequestError: The format has no place for these messages or values.
        """


class ChatTemplate:
    """How one model wants conversations written; safe to use from several threads.

    Args:
        source: Jinja source; None uses the fallback.
        tokenizer: The model's tokenizer.
        token_names: Variables that name special tokens, such as `bos_token`.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        token_names: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._token_names = dict(token_names or {})
        self._warned = False
        self._template: BoundedTemplate | None = None
        # Only some templates know the newer name of the system role.
        self._knows_developer = source is not None and "developer" in source
        if source is None:
            self._warn("the model file has no chat template")
            return
        try:
            self._template = BoundedTemplate(source)
        except TemplateFailedError as error:
            self._warn(f"the model's chat template does not compile ({error})")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, MetaValue], tokenizer: Tokenizer) -> ChatTemplate:
        """Read the template and the names of the special tokens from a GGUF file's metadata.

        Raises:
            ModelError: A key has another type than it must have.
        """
        meta = Metadata(metadata)
        names = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token = meta.get_int(f"tokenizer.ggml.{key}_token_id", -1)
            spelling = tokenizer.token_bytes(token, special=True)
            names[f"{name}_token"] = spelling.decode("utf-8", "replace")
        return cls(meta.get_str("tokenizer.chat_template", None), tokenizer, names)

    @property
    def is_fallback(self) -> bool:
        """Whether there is no usable template, so that every prompt has the fallback format."""
        return self._template is None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: In order. A missing role means "user"; content is a text, null, or a list of
                parts whose `text` values are joined; other content counts as empty.
            add_generation_prompt: End with the opening of the assistant's turn.
            variables: Further values for the template, such as `enable_thinking` or `tools`.

        Raises:
            RequestError: The template refuses the messages; its words are the message.
        """
        plain = [self._plain(message) for message in messages]
        if self._template is None:
            return self._fallback(plain, add_generation_prompt=add_generation_prompt)
        given = {
            "tools": None,
            "documents": None,
            **self._token_names,
            **variables,
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(given)
        except TemplateRefusalError as error:
            raise RequestError(str(error), code="invalid_messages", param="messages") from error
        except TemplateFailedError as error:
            self._warn(f"the model's chat template failed ({error})")
            return self._fallback(plain, add_generation_prompt=add_generation_prompt)

    def render_ids(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Return the prompt of a conversation as token ids; takes and raises what `render` does.

        Control tokens spelled anywhere in the prompt, user content included, become those tokens.
        BOS stands in front exactly once if the template writes it or the model asks for it.
        """
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self._tokenizer.prompt_ids(text)

    def _plain(self, message: Message) -> dict[str, object]:
        role = message.get("role")
        if role is None:
            role = "user"
        elif role == "developer" and not self._knows_developer:
            role = "system"
        return {**message, "role": role, "content": text_of(message.get("content"))}

    def _fallback(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool
    ) -> str:
        if {"<|im_start|>", "<|im_end|>"} <= self._tokenizer.special_ids.keys():
            turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
            opening = "<|im_start|>assistant\n"
        else:
            turns = [f"{m['role']}: {m['content']}\n" for m in messages]
            opening = "assistant:"
        return "".join([*turns, opening] if add_generation_prompt else turns)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: prompts are written in a plain fallback format, so answers may be worse",
                problem,
            )


def text_of(content: object) -> str:
    """Return the text of a message's content, in any form that clients send it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))
