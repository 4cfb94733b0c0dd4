"""What a client asks of the model: one value, from its checked body to its finish.

Owns: `GenerationRequest` and what it consists of: conversations, tools, bare prompts, forms of the
answer. Refuses to know: JSON, token ids of a conversation, who generates (what becomes of a request
is its `RequestState`). Invariant: frozen, and everything in it is checked: it can fail for what the
model or the server cannot do, never for a value that is out of range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Final, Literal

from ds4py.config import SamplingParams
from ds4py.generation.grammar import GrammarKind
from ds4py.generation.logits_processors import LogitBias

ToolKind = Literal["function", "custom", "tool_search"]

_OVERHEAD: Final = 256
"""Bytes that a turn costs beside its texts, roughly."""


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call of a tool in an earlier turn; `arguments` is the client's own JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Args:
        role: One of the five that templates know.
        content: Its text.
        reasoning: What an assistant thought before.
        calls: What an assistant asked for.
        call_id: The call that a tool answers.
        continues: It belongs to one turn with the message before, where the model's format can say
            so.
    """

    role: str
    content: str
    reasoning: str = ""
    calls: tuple[PastCall, ...] = ()
    call_id: str = ""
    continues: bool = False

    @property
    def n_bytes(self) -> int:
        """Roughly the memory that it takes."""
        texts = [self.role, self.content, self.reasoning, self.call_id]
        for call in self.calls:
            texts += call.id, call.name, call.arguments
        return sum(map(getsizeof, texts)) + _OVERHEAD


def is_begun(messages: Sequence[ChatMessage]) -> bool:
    """Tell whether a conversation ends with an answer that the model shall go on with."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].calls


@dataclass(frozen=True, slots=True)
class ToolName:
    """What a client calls a tool that the model knows by its full name."""

    kind: ToolKind
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools on offer.

    Args:
        sources: JSON texts of objects, byte for byte the client's own, since they enter the prompt.
        texts: JSON texts for the prompt; None takes the sources.
        names: Full names of those that are no plain function without a namespace.
    """

    sources: tuple[str, ...] = ()
    texts: tuple[str, ...] | None = None
    names: Mapping[str, ToolName] = field(default_factory=dict)

    @property
    def in_prompt(self) -> tuple[str, ...]:
        """JSON texts for the prompt."""
        return self.sources if self.texts is None else self.texts

    def named(self, full: str) -> ToolName:
        """Return what a client calls a tool."""
        return self.names.get(full) or ToolName("function", full)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that the model shall go on with.

    Args:
        messages: At least one. One that `is_begun` is gone on with in the middle of its last turn.
        tools: Those that the model may call.
        default_system: Begin with the model's own system text if no message has one, an addition
            of ds4py.
        member: The member of the body that holds it; what is wrong with it is blamed on this.
    """

    messages: tuple[ChatMessage, ...]
    tools: Toolbox = field(default_factory=Toolbox)
    default_system: bool = False
    member: str = "messages"

    @property
    def n_bytes(self) -> int:
        """Roughly the memory that it takes."""
        tools = {*self.tools.sources, *self.tools.in_prompt}
        return sum(turn.n_bytes for turn in self.messages) + sum(map(getsizeof, tools))


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """A prompt that is no conversation.

    Args:
        content: Text, or token ids that may be outside of the vocabulary.
        raw: The text is a whole prompt as the model reads it: its control tokens are recognised.
            An addition of ds4py.
    """

    content: str | tuple[int, ...]
    raw: bool = False


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What an answer must look like.

    Args:
        kind: How it is described.
        text: JSON text of a schema, regular expression, or Lark grammar; empty for any object.
        strict: Refuse what cannot be enforced of it, instead of leaving that out.
    """

    kind: GrammarKind
    text: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks of the model; the server's defaults are filled in.

    Args:
        prompt: What the model shall go on with.
        model: Name to echo; None takes the served model's.
        max_tokens: Output budget, tokens; 0 only evaluates the prompt. The context may allow fewer.
        sampling: How tokens are chosen.
        stop: Texts that end the answer; none is empty.
        think: How much to reason, a word of `EFFORTS`; None leaves it to the model's format.
        thinking_budget: Most tokens of reasoning; None sets no limit.
        output_format: What the answer must look like; None leaves it free.
        logit_bias: Added to the logits of every step; None adds nothing.
        n_logprobs: Ranked alternatives to report with every token; None reports no probabilities.
        token_ids: Report the sampled token ids beside the text, an addition of ds4py.
        stream: Answer by server-sent events.
        include_usage: Send the usage chunk of a stream.
        progress: Tell in comments of the stream how much of the prompt is evaluated, an addition of
            ds4py.
        show_reasoning: Report the reasoning, where the API leaves that to its client.
        call_id_prefix: What the ids of calls begin with.
    """

    prompt: Conversation | CompletionPrompt
    model: str | None = None
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    think: str | None = None
    thinking_budget: int | None = None
    output_format: OutputFormat | None = None
    logit_bias: LogitBias | None = None
    n_logprobs: int | None = None
    token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    progress: bool = False
    show_reasoning: bool = True
    call_id_prefix: str = "call_"
