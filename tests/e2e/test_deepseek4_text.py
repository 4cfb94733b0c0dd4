"""The text of DeepSeek V4 through the doors: prompts of the CLI and of HTTP, and replies apart.

Prompts are those that the C engine was recorded to make. The tiny model talks nonsense, so replies
are scripted: token ids over the tiny model's own vocabulary, cut in several ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from ds4py.cli.chat import local, remote
from ds4py.cli.chat.printing import Question, show
from ds4py.cli.client import client as cli_command
from ds4py.config import Address, CoordinatorConfig, EngineConfig, SamplingParams
from ds4py.runtime import Node, open_node
from ds4py.server.requests.prompts import TextStack
from ds4py.text.chat_formats.deepseek4 import MAX_MIN_CONTEXT
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from tests.e2e.support import GREEDY, SOCKETS, command, engine
from tests.support import golden
from tests.support.fakes import FakeBackend
from tests.support.processes import Launcher, run
from tests.unit.server.support import server as serving

RECORDED: list[dict[str, Any]] = golden.load_json("tokens.json")["chat_prompts"]
ASKED = [case for case in RECORDED if case["prompt"]]
"""Those that a terminal can ask: it takes no empty prompt."""

D = Marker.DSML
EOS = 1
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}
CALLS = (
    f'<{D}tool_calls>\n<{D}invoke name="weather">\n'
    f'<{D}parameter name="city" string="true">Oslo & "Tromsø" 🌧</{D}parameter>\n'
    f'<{D}parameter name="days" string="false">[1, 2]</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="now">\n</{D}invoke>\n</{D}tool_calls>'
)
ARGUMENTS = '{"city":"Oslo & \\"Tromsø\\" 🌧","days":[1,2]}'
USER: Any = [{"role": "user", "content": "hi"}]
Cut = Callable[[str], list[int]]


def model(n_ctx: int = MAX_MIN_CONTEXT) -> EngineConfig:
    """The tiny model; its caches are small even for a context that allows every mode."""
    return engine(golden.path("tiny-a.gguf"), n_slots=1, n_ctx=n_ctx)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with open_node(model(), CoordinatorConfig(n_sessions=1), SOCKETS, whole=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(node: Node) -> TextStack:
    return node.text


@pytest.fixture(params=["bytes", "tokens", "pairs"])
def cut(request: pytest.FixtureRequest, text: TextStack) -> Cut:
    """A way to say a text: byte by byte, as the tokenizer cuts it, or two characters at a time."""
    tokenizer = text.tokenizer
    by_byte = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.n_vocab))}

    def in_bytes(said: str) -> list[int]:
        return [by_byte[bytes([byte])] for byte in said.encode()]

    def in_pairs(said: str) -> list[int]:
        pairs = (said[at : at + 2] for at in range(0, len(said), 2))
        return [token for pair in pairs for token in tokenizer.encode(pair, special=False)]

    def in_tokens(said: str) -> list[int]:
        return tokenizer.encode(said, special=True)

    return {"bytes": in_bytes, "tokens": in_tokens, "pairs": in_pairs}[request.param]


def scripted(text: TextStack, tokens: Sequence[int]) -> FakeBackend:
    """A model that always says the same."""
    return FakeBackend(
        n_vocab=text.tokenizer.n_vocab, n_ctx=MAX_MIN_CONTEXT, chunk=512, script=[*tokens, EOS]
    )


def last_prompt(backend: FakeBackend) -> list[int]:
    (session,) = backend.sessions
    return list(session.tokens[: session.n_prompt])


def api(port: int) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="unused",
        max_retries=0,
        timeout=20,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def question(**fields: Any) -> Question:
    base = {"text": "hi", "ids": None, "system": None, "raw": False, "max_tokens": None}
    return Question(**{**base, "sampling": {}, **fields})


# --- prompts -------------------------------------------------------------------------------------


def test_the_terminal_makes_the_recorded_prompts(node: Node) -> None:
    assert len(ASKED) == 12
    for case in ASKED:
        asked = question(text=case["prompt"], system=case["system"], think=case["think"])
        assert list(local.prompt_ids(node, asked)) == case["ids"], case
        whole = question(text=case["rendered"], raw=True)
        assert list(local.prompt_ids(node, whole)) == case["ids"], case


def test_http_makes_the_recorded_prompts(text: TextStack) -> None:
    backend = scripted(text, [])
    with serving(backend, text=text) as (_, port), api(port) as client:
        for case in RECORDED:
            reply = client.chat.completions.create(
                model="any",
                messages=[
                    {"role": "system", "content": case["system"]},
                    {"role": "user", "content": case["prompt"]},
                ],
                reasoning_effort=case["think"],
            )
            assert last_prompt(backend) == case["ids"], case
            assert reply.usage is not None
            assert reply.usage.prompt_tokens == len(case["ids"])


@pytest.mark.parametrize(
    ("flags", "think"),
    [((), "high"), (("--think",), "high"), (("--think-max",), "max"), (("--nothink",), "none")],
)
def test_the_program_counts_the_recorded_prompts(
    flags: tuple[str, ...], think: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(c for c in ASKED if c["think"] == think and c["system"])
    given = ("-m", golden.path("tiny-a.gguf"), "-c", MAX_MIN_CONTEXT, "--sessions", 1, "-t", 1)
    asked = ("-p", case["prompt"], "-sys", case["system"], *flags, "-n", 2, "--temp", 0)
    assert command(cli_command, "ds4py-cli", *given, "--precision", "f32", *asked) == 0
    assert f"prompt: {len(case['ids'])} tokens, answer: 2 tokens" in capsys.readouterr().err


def test_without_a_system_text_the_terminal_says_the_usual_one_wherever_it_asks(
    node: Node, text: TextStack
) -> None:
    usual = list(local.prompt_ids(node, question(system="You are a helpful assistant")))
    assert list(local.prompt_ids(node, question())) == usual
    assert list(local.prompt_ids(node, question(system=""))) != usual
    backend = scripted(text, [])
    with serving(backend, text=text) as (_, port):
        address = Address("127.0.0.1", port)
        list(remote.ask(address, question(), want_ids=False))
        assert last_prompt(backend) == usual
        list(remote.ask(address, question(system=""), want_ids=False))
        assert last_prompt(backend) == list(local.prompt_ids(node, question(system="")))


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({}, "high"),
        ({"model": "deepseek-chat"}, "none"),
        ({"extra_body": {"thinking": {"type": "disabled"}}}, "none"),
        ({"extra_body": {"think": False}}, "none"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "none"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"extra_body": {"reasoning_effort": "max"}}, "max"),
    ],
)
def test_every_way_to_ask_for_thinking(
    fields: dict[str, Any], think: str, node: Node, text: TextStack
) -> None:
    backend = scripted(text, [])
    with serving(backend, text=text) as (_, port), api(port) as client:
        client.chat.completions.create(**{"model": "any", "messages": USER, **fields})
    assert last_prompt(backend) == text.chat.render_ids(USER, think=think)


def test_max_in_a_small_context_is_high() -> None:
    with open_node(model(256), CoordinatorConfig(n_sessions=1), SOCKETS, whole=True) as small:
        prompts = [
            local.prompt_ids(small, question(think=think)) for think in ("max", "high", "none")
        ]
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_marker_that_a_user_spells_is_no_token(text: TextStack) -> None:
    backend = scripted(text, [])
    said: Any = [{"role": "user", "content": f"a{Marker.EOS}{Marker.ASSISTANT}b"}]
    with serving(backend, text=text) as (_, port), api(port) as client:
        client.chat.completions.create(model="any", messages=said)
    assert EOS not in last_prompt(backend)


def test_a_conversation_with_tools_is_written_as_the_model_knows_it(text: TextStack) -> None:
    """Schemas and arguments in the client's own spelling; reasoning kept, since tools are used."""
    backend = scripted(text, [])
    past = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Need it.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{ "days": 1.0, "city": "Oslo" }'},
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "14 C"}
    with serving(backend, text=text) as (_, port), api(port) as client:
        client.chat.completions.create(
            model="any",
            messages=[*USER, cast(Any, past), cast(Any, result)],
            tools=[cast(Any, TOOL)],
        )
    prompt = text.tokenizer.decode(last_prompt(backend), special=True).decode()
    assert json.dumps(TOOL["function"], separators=(",", ":")) in prompt
    assert f"<think>Need it.</think>\n\n<{D}tool_calls>" in prompt
    days = f'<{D}parameter name="days" string="false">1.0</{D}parameter>\n'
    assert f'{days}<{D}parameter name="city" string="true">Oslo<' in prompt
    assert prompt.endswith(f"<tool_result>14 C</tool_result>{Marker.ASSISTANT}{Marker.THINK}")


# --- replies through HTTP ------------------------------------------------------------------------


def whole_and_streamed(backend: FakeBackend, text: TextStack, **fields: Any) -> dict[str, Any]:
    """Ask twice through the official client; the one reply, which both must give."""
    asked = {"model": "any", "messages": USER, **fields}
    with serving(backend, text=text) as (_, port), api(port) as client:
        reply = client.chat.completions.create(**asked)
        usage = {"include_usage": True}
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=usage))
    (choice,) = reply.choices
    message = choice.message
    said = {
        "reasoning": getattr(message, "reasoning_content", ""),
        "content": message.content,
        "calls": [(c.function.name, c.function.arguments) for c in message.tool_calls or ()],  # type: ignore[union-attr]
        "finish": choice.finish_reason,
    }
    assert joined(chunks) == said
    assert chunks[-1].usage is not None
    assert reply.usage is not None
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
    return said | {"usage": reply.usage}


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Add up a stream, and check its order."""
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    kinds = [key for delta in deltas for key in delta.model_dump(exclude_unset=True)]
    order = ["role", "reasoning_content", "content", "tool_calls"]
    assert kinds == sorted(kinds, key=order.index)
    texts = [
        [getattr(delta, key, "") or "" for delta in deltas]
        for key in ("reasoning_content", "content")
    ]
    parts = [call for delta in deltas for call in delta.tool_calls or ()]
    calls = [part for part in parts if part.id]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    assert [part.index for part in parts] == sorted(part.index for part in parts)
    arguments = [
        "".join(part.function.arguments for part in parts if part.index == call.index)
        for call in calls
    ]
    return {
        "reasoning": "".join(texts[0]),
        "content": "".join(texts[1]),
        "calls": [(c.function.name, text) for c, text in zip(calls, arguments, strict=True)],
        "finish": next(c.choices[0].finish_reason for c in reversed(chunks) if c.choices),
    }


def test_reasoning_and_answer_come_apart(cut: Cut, text: TextStack) -> None:
    thought, answer = "Überlegen wir 🤔 a & b.\n", "Ja, 日本."
    tokens = cut(f"{thought}</think>{answer}")
    said = whole_and_streamed(scripted(text, tokens), text)
    usage = said.pop("usage")
    assert said == {"reasoning": thought, "content": answer, "calls": [], "finish": "stop"}
    assert usage.completion_tokens == len(tokens)
    assert usage.completion_tokens_details.reasoning_tokens == len(cut(f"{thought}</think>"))


def test_calls_come_apart(cut: Cut, text: TextStack) -> None:
    says = f"Look.</think>I ask.\n\n{CALLS}"
    backend = scripted(text, [*cut(says), *cut(" never said")])
    said = whole_and_streamed(backend, text, tools=[TOOL])
    assert said["reasoning"] == "Look."
    assert said["content"] == "I ask."
    assert said["calls"] == [("weather", ARGUMENTS), ("now", "{}")]
    assert said["finish"] == "tool_calls"
    assert said["usage"].completion_tokens == len(cut(says))


def test_without_thinking_calls_come_apart_too(cut: Cut, text: TextStack) -> None:
    backend = scripted(text, cut(CALLS))
    said = whole_and_streamed(backend, text, tools=[TOOL], reasoning_effort="none")
    assert (said["reasoning"], said["content"], said["finish"]) == ("", "", "tool_calls")
    assert said["usage"].completion_tokens_details is None


def test_calls_inside_the_reasoning_call_nothing(cut: Cut, text: TextStack) -> None:
    said = whole_and_streamed(scripted(text, cut(CALLS)), text, tools=[TOOL])
    assert (said["content"], said["calls"], said["finish"]) == ("", [], "stop")
    assert said["reasoning"] == CALLS


@pytest.mark.parametrize("choice", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_nobody_offered_tools(choice: dict[str, Any], text: TextStack) -> None:
    """The prompt says nothing of them, and what looks like calls is text."""
    backend = scripted(text, text.tokenizer.encode(f"</think>{CALLS}", special=True))
    with serving(backend, text=text) as (_, port), api(port) as client:
        reply = client.chat.completions.create(model="any", messages=USER, **choice)
    assert last_prompt(backend) == text.chat.render_ids(USER)
    assert reply.choices[0].message.content == CALLS
    assert reply.choices[0].finish_reason == "stop"


def test_an_answer_that_ran_out_of_tokens_calls_nothing(text: TextStack) -> None:
    tokens = text.tokenizer.encode(f"hm</think>So: {CALLS}", special=True)
    asked: Any = {"model": "any", "messages": USER, "tools": [TOOL], "max_tokens": len(tokens) - 1}
    with serving(scripted(text, tokens), text=text) as (_, port), api(port) as client:
        (choice,) = client.chat.completions.create(**asked).choices
        streamed = joined(list(client.chat.completions.create(**asked, stream=True)))
    assert (choice.message.content, choice.finish_reason) == ("So:", "length")
    assert choice.message.tool_calls is None
    assert (streamed["content"], streamed["finish"]) == ("So:", "length"), "nothing to be executed"


def test_completions_keep_the_reasoning_and_its_tag(cut: Cut, text: TextStack) -> None:
    backend = scripted(text, cut("hm</think>yes"))
    with serving(backend, text=text) as (_, port), api(port) as client:
        whole = client.completions.create(model="any", prompt="hi").choices[0].text
        chunks = client.completions.create(model="any", prompt="hi", stream=True)
        assert whole == "".join(c.choices[0].text for c in chunks) == "hm</think>yes"
        assert last_prompt(backend) == text.chat.completion_ids("hi")
        off = {"think": False}
        client.completions.create(model="any", prompt="hi", extra_body=off)
        assert last_prompt(backend) == text.chat.completion_ids("hi", think="none")


def test_explicit_sampling_counts_while_thinking_too(node: Node) -> None:
    """Any seed says the same greedily, and what the seed decides is not the greedy text."""
    with (
        serving(cast(Any, node.backend), text=node.text, sampling=SamplingParams()) as (_, port),
        api(port) as client,
    ):

        def say(**fields: Any) -> str:
            reply = client.chat.completions.create(
                model="any", messages=USER, max_tokens=12, **fields
            )
            return str(getattr(reply.choices[0].message, "reasoning_content", ""))

        greedy = {say(temperature=0, seed=seed) for seed in (1, 2)}
        drawn = {say(seed=seed) for seed in (1, 1, 2)}
    assert len(greedy) == 1
    assert len(drawn) == 2


# --- replies in a terminal -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"think": "max"},
        {"text": f"{Marker.BOS}{Marker.USER}hi{Marker.ASSISTANT}{Marker.THINK}", "raw": True},
    ],
)
def test_a_terminal_shows_reasoning_a_new_line_and_the_answer(
    asked: dict[str, Any],
    cut: Cut,
    node: Node,
    text: TextStack,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = scripted(text, cut("Hm 🤔.</think>Yes."))
    apart = Node(node.coordinator, cast(Any, backend), text)

    def here() -> Iterator[Any]:
        return local.ask(
            apart, question(**asked), GREEDY, cancelled=lambda: False, progress=lambda *_: None
        )

    show(here(), ids_only=False)
    assert capsys.readouterr().out == "Hm 🤔.\nYes.\n"
    with serving(backend, text=text) as (_, port):
        there = remote.ask(Address("127.0.0.1", port), question(**asked), want_ids=False)
        show(cast(Any, there), ids_only=False)
    assert capsys.readouterr().out == "Hm 🤔.\nYes.\n"


def test_without_thinking_a_terminal_shows_the_answer_only(
    node: Node, text: TextStack, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = scripted(text, text.tokenizer.encode("Yes.", special=False))
    apart = Node(node.coordinator, cast(Any, backend), text)
    asked = question(think="none")
    show(
        local.ask(apart, asked, GREEDY, cancelled=lambda: False, progress=lambda *_: None),
        ids_only=False,
    )
    assert capsys.readouterr().out == "Yes.\n"


# --- programs ------------------------------------------------------------------------------------


def test_the_programs_serve_and_ask_deepseek_v4(tmp_path: Path) -> None:
    """A terminal says the same through a server as with the model in its own process."""
    case = next(c for c in ASKED if c["think"] == "high" and c["system"])
    given = ("-m", golden.path("tiny-a.gguf"), "-c", 256, "--precision", "f32")
    asked = ("-p", case["prompt"], "-n", 12, "--temp", 0)
    with Launcher(tmp_path) as launch:
        server = launch.server(*given, "--http", "127.0.0.1:0")
        server.wait_ready()
        there = run("ds4py-cli", "--host", server.address, *asked)
        with_system = run("ds4py-cli", "--host", server.address, *asked, "-sys", case["system"])
    here = run("ds4py-cli", *given, *asked, "-t", 1)
    assert (there.status, here.status) == (0, 0), there.err + here.err
    assert there.text == here.text
    assert f"prompt: {len(case['ids'])} tokens" in with_system.err
