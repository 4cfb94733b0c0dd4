"""What all dialects share: the parts of the server that they need, and the plan that they make.

Owns: `Service`, `PreparedRequest`, the rules that hold in every dialect for reasoning and for
tools. Refuses to know: bodies and shapes of one dialect. Invariant: a plan's prompt fits the
context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from ds4py.config import ServerConfig
from ds4py.contracts import Backend
from ds4py.errors import RequestError
from ds4py.generation.grammar import Constraint, GrammarKind, GrammarSource
from ds4py.server.api.chat_messages import ChatMessage, PastCall
from ds4py.server.api.options import Options
from ds4py.server.api.reply import ResponseShape
from ds4py.server.history.disk_prefix_cache import DiskPrefixCache, PrefixLength
from ds4py.server.history.exact_tokens import ExactTokens, common_prefix
from ds4py.server.history.pending_tools import Kept, PendingTools
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.server.http.admission import AdmissionControl
from ds4py.server.observability.request_metrics import RequestMetrics
from ds4py.server.requests.events import Answer
from ds4py.server.requests.prompts import (
    Manner,
    TextStack,
    chat_prompt,
    check_fits,
    excess,
    is_begun,
    retry_prompt,
    too_long,
)
from ds4py.server.requests.queue import RequestQueue
from ds4py.server.requests.request import Conclude, Retry
from ds4py.text.tool_calls.formats import CallFormat


@dataclass(frozen=True, slots=True)
class Service:
    """What all generating endpoints share.

    Args:
        backend: Sessions of the model.
        text: Tokenizer and chat format.
        config: Limits and defaults.
        queue: Generation threads.
        numbers: Source of reply ids.
        tools: The words in which the model called tools.
        grammars: Makes constraints for the vocabulary of the model.
        pending_tools: Turns that a client may go on with by results of tools alone.
        metrics: Counts requests.
        exact_tokens: What was really said, behind what prompts show.
        admission: Lets requests in.
        disk_prefixes: Sessions on disk; None keeps none.
    """

    backend: Backend
    text: TextStack
    config: ServerConfig
    queue: RequestQueue
    numbers: Iterator[int]
    tools: ToolCallMemory
    grammars: GrammarSource
    pending_tools: PendingTools
    metrics: RequestMetrics
    exact_tokens: ExactTokens
    admission: AdmissionControl
    disk_prefixes: DiskPrefixCache | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked request.

    Args:
        prompt: Token ids.
        options: What it says about its answer.
        reply: Makes the shapes from (number, unix time, model name).
        thinking: The prompt opened the reasoning, which the dialect returns apart.
        may_think: The model may open it itself.
        calls: How the model writes calls, which the dialect returns apart; None leaves them text.
        call_prefix: What the ids of calls begin with.
        retry: Writes what asks for another reply behind calls that cannot be read.
        constraint: The grammar of the answer; None leaves it free.
        conclude: Takes note of the whole reply.
        prefix_length: Tells how many tokens stand before the first question.
    """

    prompt: tuple[int, ...]
    options: Options
    reply: Callable[[int, int, str], ResponseShape]
    thinking: bool = False
    may_think: bool = False
    calls: CallFormat | None = None
    call_prefix: str = "call_"
    retry: Retry | None = None
    constraint: Constraint | None = None
    conclude: Conclude | None = None
    prefix_length: PrefixLength | None = None


Write = Callable[..., tuple[int, ...]]
"""`chat_prompt` with everything given but the turns and `answered`."""

_TURN_OPENING: Final = 32
"""Tokens at the end of a prompt that open the answer, at most, and stand otherwise later on."""

_OTHER_QUESTIONS: Final = ("\u2042", "\u203d")
"""Questions that nobody asks, to see where questions begin."""

_GRAMMARS: Final = {
    "json_object": GrammarKind.JSON_OBJECT,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "grammar": GrammarKind.LARK,
}

Prepare = Callable[[Service, bytes], PreparedRequest]
"""Checks a body and makes its prompt; runs on a helper thread, raises `RequestError`."""


@dataclass(frozen=True, slots=True)
class PreparedConversation:
    """A checked conversation as the model reads it.

    Args:
        messages: Its turns.
        prompt: Token ids.
        write: Writes other turns in the same way.
        thinking: The prompt opened the reasoning.
        may_think: The model may open it itself.
        calls: How the model writes calls; None if it can call nothing.
        retry: See `PreparedRequest.retry`.
    """

    messages: tuple[ChatMessage, ...]
    prompt: tuple[int, ...]
    write: Write
    thinking: bool
    may_think: bool
    calls: CallFormat | None
    retry: Retry

    def prefix_length(self) -> int:
        """Return how many tokens stand before the first question, whatever it is.

        That is the last turn of a user before any answer; what stands before it, system text and
        tools, is what other conversations begin with too.
        """
        roles = [message.role for message in self.messages]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        asked = [n for n in range(end) if roles[n] == "user"]
        if not asked:
            return 0
        other = (*self.messages[: asked[-1]], ChatMessage("user", _OTHER_QUESTIONS[0]))
        return common_prefix(self.prompt, self.write(other))


def converse(
    service: Service,
    messages: Sequence[ChatMessage],
    options: Options,
    *,
    tools: Sequence[str],
    param: str | None,
    default_system: bool = False,
) -> PreparedConversation:
    """Write a conversation as the model reads it.

    Args:
        service: Of the server.
        messages: The conversation.
        options: Of the request.
        tools: JSON texts of those on offer.
        param: The member that an overlong conversation is blamed on; None lets it pass.
        default_system: Begin with the format's own system text if no message has one.

    Raises:
        RequestError: The format refuses the conversation, or it does not fit the context.
    """
    if options.form is not None and tools:
        raise RequestError(
            "response_format: got it together with tools, expected one of them; drop the other",
            param="response_format",
        )
    config, chat = service.config, service.text.chat
    if tools and chat.call_format is None:
        raise RequestError(
            "tools: got some, expected none: this model's chat format has no place for tools; "
            "serve a model that can call them, or leave them out",
            code="tools_not_supported",
            param="tools",
        )
    n_far_too_many = excess(service.text, messages, tools, service.backend.n_ctx)
    if n_far_too_many is not None:
        raise too_long(n_far_too_many, service.backend.n_ctx, param=param or "messages")
    think = config.think if options.think is None else options.think
    if service.disk_prefixes is not None:
        service.disk_prefixes.recall_calls([call.id for turn in messages for call in turn.calls])
    manner = Manner(
        think=think,
        tools=tools,
        default_system=default_system,
        system_in_place=config.system_in_place,
        block_for=service.tools.block_for if config.exact_replay else None,
    )
    write = partial(chat_prompt, service.text, manner=manner)
    prompt = write(messages)
    if param is not None:
        check_fits(prompt, service.backend.n_ctx, param=param)
    return PreparedConversation(
        tuple(messages),
        prompt,
        write,
        thinking=chat.opens_reasoning(prompt),
        may_think=chat.may_think and think != "none",
        calls=chat.call_format if tools else None,
        retry=partial(retry_prompt, service.text, messages, manner),
    )


def constraint_of(service: Service, options: Options) -> Constraint | None:
    """Compile the grammar of a request's answer.

    Raises:
        RequestError: It cannot be enforced.
    """
    form = options.form
    if form is None:
        return None
    return service.grammars.compile(_GRAMMARS[form.kind], form.text, lenient=not form.strict)


def keeping(
    service: Service, conversation: PreparedConversation, tools: Sequence[str] = ()
) -> Conclude:
    """Return what remembers a conversation and the reply to it, for those that go on with it.

    Args:
        service: Of the server.
        conversation: Before the reply.
        tools: The client's own JSON texts of those on offer.
    """

    def keep(answer: Answer, tokens: tuple[int, ...]) -> None:
        calls = tuple(PastCall(call.id, call.name, call.arguments) for call in answer.calls)
        before = conversation.messages
        reply = ChatMessage("assistant", answer.text, reasoning=answer.reasoning, calls=calls)
        if is_begun(before):
            before, reply = before[:-1], _whole(before[-1], reply)
        kept = Kept((*before, reply), tuple(tools))
        if calls:
            service.pending_tools.keep([call.id for call in calls], kept)
        if tokens:
            bare = replace(reply, reasoning="")
            # clients send the reasoning of calls back, if any, and few send another
            shown = [reply, bare] if calls else [bare, reply]
            write, said = conversation.write, [(*before, turn) for turn in shown]
            views = [partial(_visible, service, write, messages) for messages in said]
            is_first = all(message.role != "assistant" for message in before)
            n_opening = max(0, len(conversation.prompt) - _TURN_OPENING) if is_first else 0
            service.exact_tokens.keep(tokens, views, kept.n_bytes, n_opening)

    return keep


def _whole(begun: ChatMessage, reply: ChatMessage) -> ChatMessage:
    """Return a turn of which the client wrote the beginning."""
    content = begun.content + reply.content
    return replace(reply, content=content, reasoning=begun.reasoning + reply.reasoning)


def _visible(
    service: Service, write: Write, said: tuple[ChatMessage, ...]
) -> tuple[int, ...] | None:
    """Return what later prompts show of a conversation and its reply, without the reply's end.

    Formats write an answer otherwise when something follows it, without its reasoning for example;
    what follows is not known yet, so it is what all prompts that go on have in common.
    """
    calls = said[-1].calls
    role, call_id = ("tool", calls[0].id) if calls else ("user", "")
    try:
        written, other = (
            write((*said, ChatMessage(role, text, call_id=call_id)), answered=True)
            for text in _OTHER_QUESTIONS
        )
    except RequestError:  # the format refuses such a turn, which is no fault of who asks now
        return None
    ends = service.text.tokenizer.eos_ids
    shared = range(common_prefix(written, other) - 1, -1, -1)
    last = next((n for n in shared if written[n] in ends), None)
    return None if last is None else written[:last]


def gone_on(
    service: Service, messages: Sequence[ChatMessage], *, id_name: str, history: str
) -> Kept | None:
    """Return the whole conversation that results of tools end; None if they bring their own.

    Args:
        service: Of the server.
        messages: Those of the request.
        id_name: The dialect's word for the id of a call.
        history: The dialect's words for all that a client should send instead.

    Raises:
        RequestError: There are results only, and of calls that are not known.
    """
    results = [message for message in messages if message.role != "system"]
    if not results or any(message.role != "tool" for message in results):
        return None
    kept = service.pending_tools.find([message.call_id for message in results])
    if kept is None:
        raise RequestError(
            f"{id_name} {results[0].call_id!a:.80} is unknown to the live session; "
            f"replay the full {history}",
            param=id_name,
        )
    return Kept((*kept.messages, *results), kept.tools)
