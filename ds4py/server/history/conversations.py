"""What a server remembers of conversations, for those that come back.

Owns: the four memories, and what each of them is told about a reply. Refuses to know: sessions, how
a conversation is written (`View`), requests. Invariant: a reply is remembered before its client
hears of the end, so that the next request finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from ds4py.server.history.disk_prefix_cache import DiskPrefixCache
from ds4py.server.history.exact_tokens import ExactTokens, Tokens
from ds4py.server.history.pending_tools import PendingTools
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.server.requests.events import Answer
from ds4py.server.requests.request import ChatMessage, Conversation, PastCall, is_begun

Visible = Callable[[tuple[ChatMessage, ...]], Sequence[int] | None]
"""Writes what later prompts show of a conversation that ends with a reply; None if it cannot."""

_TURN_OPENING: Final = 32
"""Tokens at the end of a prompt that open the answer, at most, and stand otherwise later on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationMemory:
    """The memories of one server; each is safe to use from several threads.

    Args:
        tool_calls: The words in which the model called tools.
        exact_tokens: What was really said, behind what prompts show.
        pending_tools: Conversations that a client may go on with by results of tools alone.
        disk_prefixes: Sessions on disk; None keeps none.
    """

    tool_calls: ToolCallMemory = field(default_factory=ToolCallMemory)
    exact_tokens: ExactTokens = field(default_factory=ExactTokens)
    pending_tools: PendingTools = field(default_factory=PendingTools)
    disk_prefixes: DiskPrefixCache | None = None

    def keep(
        self,
        conversation: Conversation,
        answer: Answer,
        tokens: Tokens,
        *,
        n_prompt: int,
        visible: Visible,
    ) -> None:
        """Remember a conversation and the reply to it.

        Args:
            conversation: Before the reply.
            answer: The whole reply.
            tokens: Of prompt and reply as they were evaluated and sampled; none if the reply is not
                all that they say.
            n_prompt: Tokens of the prompt as it was written.
            visible: Called later, on any thread.
        """
        calls = tuple(PastCall(call.id, call.name, call.arguments) for call in answer.calls)
        before = conversation.messages
        reply = ChatMessage("assistant", answer.text, reasoning=answer.reasoning, calls=calls)
        if is_begun(before):
            before, reply = before[:-1], _whole(before[-1], reply)
        kept = replace(conversation, messages=(*before, reply))
        if calls:
            self.pending_tools.keep([call.id for call in calls], kept)
        if not tokens:
            return
        bare = replace(reply, reasoning="")
        # clients send the reasoning of calls back, if any, and few send another
        shown = [reply, bare] if calls else [bare, reply]
        views = [partial(visible, (*before, turn)) for turn in shown]
        is_first = all(message.role != "assistant" for message in before)
        n_opening = max(0, n_prompt - _TURN_OPENING) if is_first else 0
        self.exact_tokens.keep(tokens, views, kept.n_bytes, n_opening)


def _whole(begun: ChatMessage, reply: ChatMessage) -> ChatMessage:
    """Return a turn of which the client wrote the beginning."""
    content = begun.content + reply.content
    return replace(reply, content=content, reasoning=begun.reasoning + reply.reasoning)
