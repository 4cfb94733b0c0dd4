"""Conversations as DeepSeek V4 reads them: messages to prompt, without a template in the file.

Owns: turns, reasoning kept or dropped, thinking modes
(docs/spec/deepseek4-model.md#building-blocks, #single-turn, #thinking, #turns). Refuses to know:
tool markup (`dsml`), HTTP, sessions. Invariant: a prompt is built of markers and ordinary text, so
nothing that a client writes becomes a marker, unless ds4's way is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Final

from ds4py.errors import RequestError
from ds4py.text.chat_formats.dsml import ToolCall, call_parts, exact_parts, preamble_parts
from ds4py.text.chat_formats.template import MessageFields, text_of
from ds4py.text.tokenizer.deepseek4_tokens import Marker, PromptPart, no_marker
from ds4py.text.tokenizer.tokenizer import Tokenizer
from ds4py.text.tool_calls.formats import DSML


class ThinkMode(StrEnum):
    """How much the model reasons before it answers."""

    NONE = "none"
    HIGH = "high"
    MAX = "max"


EFFORTS: Final[Mapping[str, ThinkMode]] = {
    **dict.fromkeys(("minimal", "low", "medium", "high", "xhigh"), ThinkMode.HIGH),
    "none": ThinkMode.NONE,
    "max": ThinkMode.MAX,
}
"""The words of requests to modes; the model knows two ways of thinking only."""

MAX_MIN_CONTEXT: Final = 393_216
"""Context size in tokens below which `ThinkMode.MAX` is `ThinkMode.HIGH`."""

DEFAULT_SYSTEM: Final = "You are a helpful assistant"
"""System text of bare completion prompts, and of a terminal chat that sets no other."""

MAX_EFFORT: Final = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

"""
"""What `ThinkMode.MAX` puts behind BOS: the publisher's constant, 476 bytes."""

_RESULT_END: Final = "</tool_result>"
_ROLES: Final = {"developer": "system", "function": "tool"}

_UNREADABLE: Final = (
    "This call of a tool cannot be read, and nothing was done. Write a new one exactly as "
    "described below, or answer without tools."
)


class DeepSeek4Chat:
    """How DeepSeek V4 wants conversations written; safe to use from several threads.

    Args:
        tokenizer: The model's tokenizer.
        n_ctx: Context size in tokens, which decides whether `ThinkMode.MAX` is possible.
        spelled_markers: Do as ds4's server does: markers spelled anywhere in the prompt become
            tokens, also in what users wrote. By default they stay ordinary characters; the ids are
            the same for texts that spell none.

    Raises:
        ModelError: A marker is not in the vocabulary.
    """

    default_system: Final = DEFAULT_SYSTEM
    call_format: Final = DSML
    may_think: Final = False

    def __init__(self, tokenizer: Tokenizer, n_ctx: int, *, spelled_markers: bool = False) -> None:
        self._tokenizer = tokenizer
        self._n_ctx = n_ctx
        self._spelled_markers = spelled_markers
        self._ids = {marker: _only_id(tokenizer, marker) for marker in Marker}

    def mode(self, think: object = None) -> ThinkMode:
        """Return the mode that a request gets.

        Args:
            think: A `ThinkMode` or another word of `EFFORTS`; None means high.

        Raises:
            RequestError: It is something else.
        """
        asked = EFFORTS.get(think) if isinstance(think, str) else None
        if think is not None and asked is None:
            raise RequestError(
                f"reasoning effort: got {think!a:.40}, expected one of {', '.join(EFFORTS)}",
                param="reasoning_effort",
            )
        if asked is ThinkMode.MAX and self._n_ctx < MAX_MIN_CONTEXT:
            return ThinkMode.HIGH
        return asked or ThinkMode.HIGH

    def render(
        self,
        messages: Sequence[MessageFields],
        *,
        add_generation_prompt: bool = True,
        system_in_place: bool = False,
        **variables: object,
    ) -> str:
        """Return the prompt text of a conversation; see `render_ids`."""
        systems, turns = _read(messages, in_place=system_in_place)
        return "".join(self._parts(systems, turns, variables, opened=add_generation_prompt))

    def render_ids(
        self,
        messages: Sequence[MessageFields],
        *,
        add_generation_prompt: bool = True,
        system_in_place: bool = False,
        **variables: object,
    ) -> list[int]:
        """Return the prompt of a conversation as token ids, BOS first.

        Args:
            messages: As OpenAI clients send them, any `content` that `text_of` knows; unknown roles
                are left out. An assistant's may have `reasoning_content`, `tool_calls`, and
                `tool_block`: the block of just these calls as the model once wrote it, with the
                white space before it, which is then repeated to the letter. Its tags become tokens,
                so it must come from a memory of our own and never from a client. A user's or a
                tool's with a true `continues` stays in the turn before it.
            add_generation_prompt: End with the opening of the assistant's turn, if it is its turn.
            system_in_place: Leave system texts where they are among the turns: what was cached
                before one stays valid. There is no marker for them, so they are bare text.
            variables: `think`, see `mode`, and `tools`, see `preamble_parts`; others are ignored.

        Raises:
            RequestError: `think` or `tools` cannot be understood.
        """
        systems, turns = _read(messages, in_place=system_in_place)
        parts = self._parts(systems, turns, variables, opened=add_generation_prompt)
        if self._spelled_markers:
            return self._tokenizer.encode("".join(parts), special=True)
        return self.encode(parts)

    def retry_ids(
        self,
        messages: Sequence[MessageFields],
        *,
        think: str | None = None,
        tools: Sequence[str] = (),
    ) -> list[int]:
        """See `ChatFormat.retry_ids`: a result that says what happened, and the rules once more."""
        mode = self.mode(think)
        systems, _ = _read(messages, in_place=False)
        parts: list[PromptPart] = [Marker.EOS, Marker.USER, _tool_result(_UNREADABLE), "\n\n"]
        parts += _head(systems, tools)
        parts += [Marker.ASSISTANT, Marker.THINK_END if mode is ThinkMode.NONE else Marker.THINK]
        return self.encode(parts)

    def completion_ids(self, prompt: str, *, think: str | None = None) -> list[int]:
        """Return the ids of a bare prompt: as in ds4, a user's turn behind `DEFAULT_SYSTEM`."""
        system = {"role": "system", "content": DEFAULT_SYSTEM}
        return self.render_ids([system, {"role": "user", "content": prompt}], think=think)

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Tell whether a reply to these token ids begins inside the reasoning."""
        return bool(prompt) and prompt[-1] == self._ids[Marker.THINK]

    def encode(self, parts: Iterable[PromptPart]) -> list[int]:
        """Return the ids of a prompt in parts; text that no marker divides is tokenized as one."""
        ids: list[int] = []
        for is_marker, run in groupby(parts, lambda part: isinstance(part, Marker)):
            if is_marker:
                ids += [self._ids[Marker(part)] for part in run]
            else:
                ids += self._tokenizer.encode("".join(run), special=False)
        return ids

    def _parts(
        self,
        systems: Sequence[str],
        turns: Sequence[_PromptTurn],
        variables: Mapping[str, object],
        *,
        opened: bool,
    ) -> list[PromptPart]:
        mode = self.mode(variables.get("think"))
        tools = variables.get("tools") or ()
        if not isinstance(tools, list | tuple):
            raise RequestError(f"tools: got {tools!a:.40}, expected a list", param="tools")
        parts: list[PromptPart] = [Marker.BOS]
        if mode is ThinkMode.MAX:
            parts.append(MAX_EFFORT)
        parts += _head(systems, tools)
        parts += _conversation(turns, thinking=mode is not ThinkMode.NONE, tools=bool(tools))
        if opened and turns and turns[-1].role != "assistant":
            thinks = mode is not ThinkMode.NONE
            parts += [Marker.ASSISTANT, Marker.THINK if thinks else Marker.THINK_END]
        return parts


@dataclass(frozen=True, slots=True)
class _PromptTurn:
    """A message that has its own place; `calls` is the assistant's block or empty."""

    role: str
    text: str
    reasoning: str
    calls: list[PromptPart]
    continues: bool = False


def _read(
    messages: Sequence[MessageFields], *, in_place: bool
) -> tuple[list[str], list[_PromptTurn]]:
    """Tell apart the texts that go to the front and the turns."""
    systems: list[str] = []
    turns: list[_PromptTurn] = []
    for message in messages:
        said = message.get("role")
        role = "user" if said is None else _ROLES.get(str(said), str(said))
        text = text_of(message.get("content"))
        if role == "system" and not (in_place and turns):
            systems.append(text)
        elif role in ("system", "user", "tool"):
            turns.append(_PromptTurn(role, text, "", [], continues=bool(message.get("continues"))))
        elif role == "assistant":
            reasoning = text_of(message.get("reasoning_content"))
            turns.append(_PromptTurn(role, text, reasoning, _calls(message)))
    return systems, turns


def _calls(message: MessageFields) -> list[PromptPart]:
    found = message.get("tool_calls")
    listed = found if isinstance(found, list | tuple) else ()
    calls = [call for item in listed if (call := ToolCall.from_message(item)) is not None]
    exact = message.get("tool_block")
    if calls and isinstance(exact, str) and exact:
        return exact_parts(exact)
    return call_parts(calls) if calls else []


def _head(systems: Iterable[str], tools: Sequence[object]) -> list[PromptPart]:
    """Return the tools on offer and the system texts, a blank line between any two."""
    parts = preamble_parts(tools) if tools else []
    for text in filter(None, systems):
        parts += ["\n\n", text] if parts else [text]
    return parts


def _conversation(turns: Sequence[_PromptTurn], *, thinking: bool, tools: bool) -> list[PromptPart]:
    """Return all turns; reasoning of old ones is left out unless tools are in play."""
    keeps_all = tools or any(turn.calls or turn.role == "tool" for turn in turns)
    asked = [n for n, turn in enumerate(turns) if turn.role in ("user", "tool")]
    last_asked = asked[-1] if asked else -1
    parts: list[PromptPart] = []
    before = "assistant"
    for n, turn in enumerate(turns):
        if turn.role == "assistant":
            if before != "assistant":
                shows = thinking and (keeps_all or n > last_asked)
                thought: list[PromptPart] = [Marker.THINK, turn.reasoning] if shows else []
                parts += [Marker.ASSISTANT, *thought, Marker.THINK_END]
            parts += [turn.text, *turn.calls, Marker.EOS]
        elif turn.role == "tool":
            inside = before == "tool" or (before == "user" and turn.continues)
            parts += [] if inside else [Marker.USER]
            parts.append(_tool_result(turn.text))
        elif turn.role == "system":
            parts.append(turn.text if before == "assistant" else f"\n\n{turn.text}")
        else:
            inside = turn.continues and before in ("tool", "user")
            parts += [turn.text] if inside else [Marker.USER, turn.text]
        before = turn.role
    return parts


def _tool_result(text: str) -> str:
    escaped = text.replace(_RESULT_END, "&lt;" + _RESULT_END[1:])
    return f"<tool_result>{escaped}{_RESULT_END}"


def _only_id(tokenizer: Tokenizer, marker: Marker) -> int:
    ids = tokenizer.encode(marker, special=True)
    if len(ids) != 1:
        raise no_marker(marker)
    return ids[0]
