"""`LLM`: a model that is ready to answer.

Owns: from keyword arguments to an open node, prompts of `generate` and `chat`. Refuses to know:
tensors, sockets, flags. Invariant: what it opened is closed with it, in the reverse order; an error
while opening leaves nothing open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ds4py.api.chat import ChatSession, Message, system_messages
from ds4py.api.generation import Generation, stream_reply
from ds4py.config import (
    CoordinatorConfig,
    EngineConfig,
    KvType,
    Precision,
    SamplingParams,
    SocketConfig,
    parse_route,
    parse_size,
)
from ds4py.errors import ClusterError, ConfigError
from ds4py.generation.sampling import Sampler
from ds4py.layer_range import LayerSpec

if TYPE_CHECKING:
    from ds4py.runtime import Node

GREEDY: Final = SamplingParams(temperature=0)
"""Takes the most probable token each time."""


class LLM:
    """A GGUF model, whole in this process or cut over a route of workers.

        with ds4py.LLM("M.gguf") as llm:
            print(llm.chat([{"role": "user", "content": "Hello"}]).text)

        with ds4py.LLM("M.gguf", route=["worker1:8001", "worker2:8002"]) as llm: ...

    Replies of several threads share the model, as requests of a server do; one `Generation` belongs
    to one thread.

    Args:
        model: GGUF file, or any shard of a split one. Over a route only the tokenizer and the
            layers of this process are read from it.
        route: Workers in the order of their layers, "HOST:PORT" or, for one that does not announce
            its layers, "HOST:PORT=13:output". None computes every layer here.
        layers: First layers of the model that this process computes before the route, as "0-9".
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "f32" computes in float32 for exactness; "bf16" is fast; "auto" is "bf16".
        n_ctx: Tokens of a conversation; None takes the model's, at most 32768.
        sessions: Conversations whose caches are kept at once, and that can be answered at once.
        kv_type: Type of cached keys and values: "auto", "f32", "bf16", "f16" or "q8_0".
        kv_budget: Memory for caches as "8G"; None takes what they need, at most half of what is
            free.
        threads: CPU threads; None takes what the machine has, at most 12.
        connect_seconds: How long to wait for the workers of a route.
        progress: Told (bytes of weights loaded, bytes of weights in this process).

    Raises:
        ConfigError: An argument cannot be used.
        GgufError: The file cannot be read.
        ModelError: The file's model cannot be computed.
        CapacityError: There is not enough memory.
        ClusterError: The route was not complete in time; names the missing layers.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        route: Sequence[str] | None = None,
        layers: str | None = None,
        device: str = "auto",
        precision: Precision = "auto",
        n_ctx: int | None = None,
        sessions: int = 4,
        kv_type: KvType = "auto",
        kv_budget: str | None = None,
        threads: int | None = None,
        connect_seconds: float = 60.0,
        progress: Callable[[int, int], None] | None = None,
    ):
        if layers is not None and not route:
            raise ConfigError("layers: only with a route; without one all layers are computed here")
        engine = EngineConfig(
            model=Path(model),
            device=device,
            precision=precision,
            n_ctx=n_ctx,
            n_slots=sessions,
            kv_type=kv_type,
            kv_budget=None if kv_budget is None else parse_size(kv_budget),
            threads=threads,
        )
        config = CoordinatorConfig(
            route=parse_route(",".join(route)) if route else (),
            layers=None if layers is None else LayerSpec.parse(layers),
            n_sessions=sessions,
        )
        with ExitStack() as stack:
            self._node = _open(stack, engine, config, progress)
            if route:
                _wait(self._node, connect_seconds)
            self._stack = stack.pop_all()

    @property
    def name(self) -> str:
        """The model's name."""
        return self._node.backend.card.name

    @property
    def n_ctx(self) -> int:
        """Tokens that a prompt and its reply can have together."""
        return self._node.backend.n_ctx

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text as a prompt of `generate` has them."""
        return list(self._node.text.tokenizer.prompt_ids(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._node.text.tokenizer.decode(ids).decode("utf-8", "replace")

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Continue a text, or token ids, as they are: no chat format is applied.

        Args:
            prompt: Text, or token ids with everything that the model expects at the start.
            max_tokens: Budget of the reply; None is what the context has left.
            sampling: How tokens are chosen; the default is greedy.
            stop: Strings that end the reply; they and what follows are left out.

        Returns:
            The reply, of which nothing is computed before it is read.

        Raises:
            ConfigError: There is no prompt.
        """
        ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ConfigError("prompt: got no tokens, expected at least one")
        return self._reply(ids, max_tokens, Sampler(sampling), stop)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
        think: str | None = None,
    ) -> Generation:
        """Answer a conversation in the model's chat format.

        Args:
            messages: Turns as `{"role": ..., "content": ...}`, the user's last. Without a system
                message the format's own is used.
            max_tokens: As in `generate`.
            sampling: As in `generate`.
            stop: As in `generate`.
            think: How much to reason: "none", "high" or "max"; None leaves it to the model.

        Returns:
            The reply, of which nothing is computed before it is read.

        Raises:
            ConfigError: There is no message.
            RequestError: The model's chat format refuses the conversation.
        """
        if not messages:
            raise ConfigError("messages: got none, expected at least one message of the user")
        chat = self._node.text.chat
        has_system = any(turn.get("role") == "system" for turn in messages)
        whole = [*([] if has_system else system_messages(chat, None)), *messages]
        ids = chat.render_ids(whole, think=think)
        return self._reply(ids, max_tokens, Sampler(sampling), stop)

    def session(
        self,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        sampling: SamplingParams = GREEDY,
        stop: Sequence[str] = (),
        think: str | None = None,
    ) -> ChatSession:
        """Begin a conversation that goes on from the exact tokens of what was said.

        Args:
            system: System text; None is the format's own, empty is none.
            max_tokens: As in `generate`, of each reply.
            sampling: As in `generate`; one generator of random numbers serves all replies.
            stop: As in `generate`.
            think: As in `chat`.
        """
        sampler = Sampler(sampling)

        def reply(prompt: Sequence[int], took: Callable[[Sequence[int]], None]) -> Generation:
            return self._reply(prompt, max_tokens, sampler, stop, took)

        return ChatSession(self._node.text, reply, system, think)

    def close(self) -> None:
        """Free the model and end the connections; idempotent."""
        self._stack.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _reply(
        self,
        ids: Sequence[int],
        max_tokens: int | None,
        sampler: Sampler,
        stop: Sequence[str],
        took: Callable[[Sequence[int]], None] | None = None,
    ) -> Generation:
        events = stream_reply(
            self._node,
            ids,
            sampler,
            thinking=self._node.text.chat.opens_reasoning(ids),
            max_tokens=max_tokens,
            stop=stop,
        )
        return Generation(events, took)


def _open(
    stack: ExitStack,
    engine: EngineConfig,
    config: CoordinatorConfig,
    progress: Callable[[int, int], None] | None,
) -> Node:
    """Open a node, and dial its route."""
    # here, because it imports torch
    from ds4py.runtime import join_cluster, open_listeners, open_node  # noqa: PLC0415

    sockets = SocketConfig()
    listeners = stack.enter_context(open_listeners(config, None, sockets))
    whole = not config.route
    node = stack.enter_context(open_node(engine, config, sockets, whole=whole, progress=progress))
    stack.enter_context(join_cluster(node, listeners))
    return node


def _wait(node: Node, seconds: float) -> None:
    """Wait until a route is complete."""
    deadline, missing = time.monotonic() + seconds, "layers"

    def say(what: str) -> None:
        nonlocal missing
        missing = what

    if not node.coordinator.wait_ready(lambda: time.monotonic() > deadline, say):
        raise ClusterError(
            f"the route was not complete within {seconds:g} s: nobody serves {missing}; start the "
            "workers, or check their addresses"
        )
