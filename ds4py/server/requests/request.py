"""What a request asks of a generation thread.

Owns: `GenerationRequest`. Refuses to know: who performs it, how its events are sent. Invariant: an
order is checked; performing it can fail, but not for what it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ds4py.generation.grammar import Constraint
from ds4py.server.api.options import Options
from ds4py.server.history.disk_prefix_cache import PrefixLength
from ds4py.server.observability.request_metrics import RequestMeter, unmetered
from ds4py.server.requests.events import Answer, Early
from ds4py.text.tool_calls.formats import CallFormat

Emit = Callable[[Early], None]

Conclude = Callable[[Answer, tuple[int, ...]], None]
"""Takes note of a whole reply on the generating thread, before its client hears of the end.

Gets the tokens of prompt and reply as well; none if the reply is not all that they say.
"""

Retry = Callable[[], tuple[int, ...]]
"""Returns tokens to put behind a reply; none if there are no words for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a request asks of the model.

    Args:
        prompt: Token ids, at least one, fewer than the context holds.
        options: Sampling, stop texts and whatever else the request says of its answer.
        max_tokens: Most tokens to generate; 0 only evaluates the prompt.
        thinking: The prompt opened the reasoning, which is to be told apart from the answer.
        may_think: The model may open the reasoning itself.
        calls: How the model writes calls, which are to be read; None leaves them text.
        call_prefix: What the ids of calls begin with.
        retry: Writes what asks for another try behind calls that cannot be read; None tries once.
        constraint: The grammar of the answer; None leaves it free.
        conclude: Takes note of the whole reply, if anybody does.
        prefix_length: Tells where the first question of the prompt begins, if anybody knows.
        deadline: When to give up, in seconds of `time.monotonic`; None never.
        meter: Counts what it costs.
    """

    prompt: tuple[int, ...]
    options: Options
    max_tokens: int
    thinking: bool = False
    may_think: bool = False
    calls: CallFormat | None = None
    call_prefix: str = "call_"
    retry: Retry | None = None
    constraint: Constraint | None = field(default=None, compare=False, repr=False)
    conclude: Conclude | None = None
    prefix_length: PrefixLength | None = None
    deadline: float | None = None
    meter: RequestMeter = field(default_factory=unmetered, compare=False, repr=False)

    @property
    def late(self) -> bool:
        """Whether its time is up."""
        return self.deadline is not None and time.monotonic() > self.deadline
