"""Messages to prompt: what any chat format does, and the chat template of a GGUF file.

Owns: the protocol `ChatFormat`; what a template gets to see, what happens when it is missing or
fails, and BOS. Refuses to know: HTTP, sessions, and how templates are run within limits
(`sandbox`).
Invariant: every list of messages gives a prompt or a `RequestError`; a bad template never stops the
server.

The fallback is ChatML when the vocabulary has `<|im_start|>` and `<|im_end|>`, otherwise lines of
`role: text`. It is used for every prompt if the template is missing or does not compile, and for a
single prompt if the template fails on it (but not if it refuses the messages by its own words).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from ds4py.errors import RequestError
from ds4py.gguf.kinds import MetaValue
from ds4py.gguf.metadata import Metadata
from ds4py.text.chat_formats.sandbox import (
    BoundedTemplate,
    TemplateFailedError,
    TemplateRefusalError,
)
from ds4py.text.reasoning import THINK, THINK_END
from ds4py.text.tokenizer.tokenizer import Tokenizer
from ds4py.text.tool_calls.formats import CallFormat, format_of

_log = logging.getLogger(__name__)

_SYSTEM: Final = ("system", "developer")
_TAIL: Final = 16
"""Tokens at the end of a prompt among which an opening think tag is searched."""

MessageFields = Mapping[str, object]
"""One message as clients send it: `role`, `content`, and whatever else a template may know."""


class ChatFormat(Protocol):
    """How one model wants conversations written; safe to use from several threads."""

    @property
    def default_system(self) -> str:
        """System text that a terminal chat begins with if its user names none; may be empty."""

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes tool calls; None: tools cannot be offered to it."""

    @property
    def may_think(self) -> bool:
        """Whether a reply may open its reasoning itself, when the prompt did not."""

    def render_ids(
        self,
        messages: Sequence[MessageFields],
        *,
        add_generation_prompt: bool = True,
        think: str | None = None,
        tools: Sequence[str] = (),
        system_in_place: bool = False,
    ) -> list[int]:
        """Return the prompt of a conversation as token ids.

        Args:
            messages: In order, as OpenAI clients send them; the arguments of past calls are JSON
                texts. Beside `tool_calls` there may be `tool_block`: the text in which the model
                once wrote just these calls, which formats without a template repeat to the letter.
            add_generation_prompt: End with the opening of the assistant's turn.
            think: A word of `ds4py.text.chat_formats.deepseek4.EFFORTS`; None leaves it to the
                model's format.
            tools: Those on offer, each the JSON text of an object; none if there is no
                `call_format`.
            system_in_place: Leave system and developer messages where they are; by default all of
                their texts go to the front.

        Raises:
            RequestError: The format has no place for these messages or values.
        """

    def retry_ids(
        self,
        messages: Sequence[MessageFields],
        *,
        think: str | None = None,
        tools: Sequence[str] = (),
    ) -> list[int]:
        """Return what asks for another reply behind one whose calls cannot be read.

        Args:
            messages: The conversation before that reply.
            think: As in `render_ids`.
            tools: As in `render_ids`.

        Returns:
            Token ids that follow those of the reply; none if the format has no words for it.
        """

    def completion_ids(self, prompt: str, *, think: str | None = None) -> list[int]:
        """Return the token ids of a bare text that the model shall continue or answer."""

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Tell whether a reply to these token ids begins inside the reasoning."""


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
        self._call_format: CallFormat | None = None
        self._shows_thinking = THINK_END not in tokenizer.special_ids
        self._may_think = False
        # Only some templates know the newer name of the system role.
        self._knows_developer = source is not None and "developer" in source
        if source is None:
            self._warn("the model file has no chat template")
            return
        try:
            self._template = BoundedTemplate(source)
        except TemplateFailedError as error:
            self._warn(f"the model's chat template does not compile ({error})")
            return
        self._call_format = format_of(source)
        self._may_think = self._shows_thinking and THINK_END in source

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
    def default_system(self) -> str:
        """See `ChatFormat.default_system`: templates bring their own."""
        return ""

    @property
    def call_format(self) -> CallFormat | None:
        """See `ChatFormat.call_format`: what the template shows to the model."""
        return self._call_format

    @property
    def may_think(self) -> bool:
        """See `ChatFormat.may_think`: the template knows the tag, and a text shows it."""
        return self._may_think

    def render(
        self,
        messages: Sequence[MessageFields],
        *,
        add_generation_prompt: bool = True,
        think: str | None = None,
        tools: Sequence[str] = (),
        system_in_place: bool = False,
        **variables: object,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: In order. A missing role means "user"; content is a text, null, or a list of
                parts whose `text` values are joined; other content counts as empty. Arguments of
                past calls reach the template as values.
            add_generation_prompt: End with the opening of the assistant's turn.
            think: The template sees it as `enable_thinking`; None defines nothing.
            tools: JSON texts; the template sees values, or none.
            system_in_place: By default the template sees one system message at most, in front: many
                refuse any other.
            variables: Further values for the template.

        Raises:
            RequestError: The template refuses the messages; its words are the message.
        """
        ordered = messages if system_in_place else _system_first(messages)
        plain = [self._plain(message) for message in ordered]
        if self._template is None:
            return self._fallback(plain, add_generation_prompt=add_generation_prompt)
        given = {
            "tools": [_function(tool) for tool in tools] or None,
            "documents": None,
            **({} if think is None else {"enable_thinking": think != "none"}),
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
        messages: Sequence[MessageFields],
        *,
        add_generation_prompt: bool = True,
        think: str | None = None,
        tools: Sequence[str] = (),
        system_in_place: bool = False,
        **variables: object,
    ) -> list[int]:
        """Return the prompt of a conversation as token ids; takes and raises what `render` does.

        Control tokens spelled anywhere in the prompt, user content included, become those tokens.
        BOS stands in front exactly once if the template writes it or the model asks for it.
        """
        text = self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            think=think,
            tools=tools,
            system_in_place=system_in_place,
            **variables,
        )
        return self._tokenizer.prompt_ids(text)

    def retry_ids(
        self,
        messages: Sequence[MessageFields],
        *,
        think: str | None = None,
        tools: Sequence[str] = (),
    ) -> list[int]:
        """See `ChatFormat.retry_ids`: a template only writes whole conversations."""
        del messages, think, tools
        return []

    def completion_ids(self, prompt: str, *, think: str | None = None) -> list[int]:
        """Return the ids of a text to continue as it is; `think` has no place in it.

        Its control tokens are recognised, and BOS stands in front where the model wants one: that
        is what users of the OpenAI endpoint expect of a base model.
        """
        del think
        return self._tokenizer.prompt_ids(prompt)

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """See `ChatFormat.opens_reasoning`.

        A closing tag that is a control token never shows in a text, so nothing could be told apart.
        """
        end = self._tokenizer.decode(prompt[-_TAIL:], special=True).rstrip()
        return end.endswith(THINK.encode()) and self._shows_thinking

    def _plain(self, message: MessageFields) -> dict[str, object]:
        role = message.get("role")
        if role is None:
            role = "user"
        elif role == "developer" and not self._knows_developer:
            role = "system"
        plain = {**message, "role": role, "content": text_of(message.get("content"))}
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            plain["tool_calls"] = [_with_values(call) for call in calls]
        return plain

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


def _system_first(messages: Sequence[MessageFields]) -> Sequence[MessageFields]:
    """Return the messages with all system texts in one that comes first."""
    systems = [message for message in messages if message.get("role") in _SYSTEM]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return messages
    texts = (text_of(message.get("content")) for message in systems)
    first = {**systems[0], "content": "\n\n".join(filter(None, texts))}
    return [first, *(message for message in messages if message.get("role") not in _SYSTEM)]


def _with_values(call: object) -> object:
    """Return a past call as templates expect it: arguments as values instead of their JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    value = _value(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": value}}


def _function(text: str) -> object:
    """Return a tool as templates expect it, whichever API it was written for."""
    tool = _value(text)
    if not isinstance(tool, Mapping) or "function" in tool or "name" not in tool:
        return tool
    parameters = tool.get("parameters", tool.get("input_schema", {"type": "object"}))
    described = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _value(text: str) -> object:
    """Return what a JSON text says, or the text if it says nothing."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return text
