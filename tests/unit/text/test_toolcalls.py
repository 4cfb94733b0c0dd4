"""Tool calls read back: what the renderer writes, what models do to it, and any text at all."""

import html
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4py.text.deepseek4_tokens import Marker
from ds4py.text.dsml import ToolCall, call_parts
from ds4py.text.reasoning import THINK_END
from ds4py.text.toolcalls import CallSplitter, ParsedReply, parse_reply

STYLES = pytest.mark.parametrize("style", [Marker.DSML.value, Marker.DSML.value[1:], ""])
ENTITIES = ("&amp;", "&lt;", "&gt;", "&quot;", "&apos;")
EMPTY_CALL = "<invoke name='f'></invoke>".replace("'", '"')


def block(*lines: str, style: str = "") -> str:
    """A block in one of the styles; lines are written plain."""
    text = "\n".join(["<tool_calls>", *lines, "</tool_calls>"])
    return text.replace("</", "\0").replace("<", f"<{style}").replace("\0", f"</{style}")


def call(*parameters: str, name: str = "f") -> str:
    return "".join([f'<invoke name="{name}">', *parameters, "</invoke>"])


def parameter(name: str, body: str, string: str | None = "true") -> str:
    attribute = "" if string is None else f' string="{string}"'
    return f'<parameter name="{name}"{attribute}>{body}</parameter>'


def arguments(*parameters: str) -> str:
    """What a single call with these parameters sends to the client."""
    reply = parse_reply(block(call(*parameters)), thinking=False)
    assert [found.name for found in reply.calls] == ["f"]
    return reply.calls[0].arguments


def decoded(text: str) -> str:
    """A string as it comes back: the markup has no way to write an entity's own letters."""
    for entity in ENTITIES[1:]:
        text = text.replace(entity, html.unescape(entity))
    return text.replace("&amp;", "&")


NAMES = st.text(max_size=6) | st.text("<>&\"'ab &amp; \n", max_size=6)
D = Marker.DSML
AWKWARD = [
    *(f"</{D}parameter>", f'<{D}parameter name="x">', f"</{D}tool_calls>", "<tool_calls>"),
    *("\n", " ", "&", "<", "&lt", THINK_END, "{", '"', "\\"),
]
STRINGS = st.text(max_size=12) | st.lists(st.sampled_from(AWKWARD), max_size=6).map("".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3
)


@given(st.text(max_size=10).map(lambda text: text.replace("<", "")), CALLS, st.booleans())
@example(
    "x", [("f", {"a": f"</{Marker.DSML}parameter>", "b": [f"</{Marker.DSML}parameter>"]})], True
)
def test_calls_that_are_written_are_read_back(content: str, calls: Any, spaced: bool) -> None:
    separators = (" , ", " : ") if spaced else (",", ":")
    written = [
        ToolCall(name, json.dumps(given, ensure_ascii=spaced, separators=separators))
        for name, given in calls
    ]
    text = content + "".join(call_parts(written))
    reply = parse_reply(text, thinking=False)
    got = [(found.name, list(json.loads(found.arguments).items())) for found in reply.calls]
    expected = [
        (name, [(key, decoded(v) if isinstance(v, str) else v) for key, v in given.items()])
        for name, given in calls
    ]
    assert got == expected
    assert (reply.content, reply.content + reply.block) == (content.rstrip(), text)


@given(CALLS)
def test_arguments_come_back_without_blanks(calls: Any) -> None:
    calls = [
        (name, {k: v for k, v in given.items() if not isinstance(v, str)}) for name, given in calls
    ]
    compact = [
        ToolCall(n, json.dumps(a, ensure_ascii=False, separators=(",", ":"))) for n, a in calls
    ]
    spaced = [ToolCall(n, json.dumps(a, ensure_ascii=False, indent=1)) for n, a in calls]
    reply = parse_reply("".join(call_parts(spaced)), thinking=False)
    end = f"</{Marker.DSML}parameter>"
    assert [c.arguments.replace("\\u003c" + end[1:], end) for c in reply.calls] == [
        c.arguments for c in compact
    ]


@STYLES
def test_three_styles_are_read(style: str) -> None:
    text = "ok \n" + block(call(parameter("a", "x")), call(name="g"), style=style) + "\nmore"
    reply = parse_reply(text, thinking=False)
    assert reply.calls == (ToolCall("f", '{"a":"x"}'), ToolCall("g", "{}"))
    assert reply.content == "ok"
    assert reply.block == text.removeprefix("ok").removesuffix("\nmore")
    assert not reply.malformed


def test_the_first_tag_decides_the_style_of_all() -> None:
    inner = block(EMPTY_CALL, style=Marker.DSML)
    assert parse_reply(f"{block(EMPTY_CALL)}{inner}", thinking=False).calls == (
        ToolCall("f", "{}"),
    )
    assert parse_reply(f"<tool_calls>{inner}", thinking=False).malformed


def test_only_the_first_block_counts() -> None:
    text = block(EMPTY_CALL) + block(call(name="g"))
    assert [found.name for found in parse_reply(text, thinking=False).calls] == ["f"]


def test_blank_space_between_tags_does_not_matter() -> None:
    text = block('\n <invoke  name="f" >\n\n', parameter("a", " x\n"), " </invoke>\t")
    assert parse_reply(text, thinking=False).calls == (ToolCall("f", '{"a":" x\\n"}'),)


@pytest.mark.parametrize("string", ["true", None, "yes"])
def test_strings_are_decoded_once(string: str | None) -> None:
    body = 'a &amp;&lt;&gt;&quot;&apos; &amp;lt; &nbsp; &#60; && " é'
    assert (
        arguments(parameter("a", body, string)) == '{"a":"a &<>\\"\' &lt; &nbsp; &#60; && \\" é"}'
    )


def test_names_are_decoded() -> None:
    reply = parse_reply(block(call(parameter("&lt;&quot;", "x"), name="a&amp;b")), thinking=False)
    assert reply.calls == (ToolCall("a&b", '{"<\\"":"x"}'),)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("3", "3"),
        (" 1.00 ", "1.00"),
        ("", "null"),
        (" \n", "null"),
        ('{"b" : [1, "x  y"],\r\n\t"a": {}}', '{"b":[1,"x  y"],"a":{}}'),
        ('"text"', '"text"'),
        ('"&lt;\\u003c"', '"&lt;\\u003c"'),
    ],
)
def test_other_values_are_the_models_json_without_blanks(body: str, value: str) -> None:
    assert arguments(parameter("a", body, "false")) == f'{{"a":{value}}}'


@pytest.mark.parametrize("body", ["x", "{", "1 2", '1,"b":2', "nan", "'a'", "[" * 9999])
def test_a_value_that_is_no_json_empties_the_arguments(body: str) -> None:
    assert arguments(parameter("z", "kept?"), parameter("a", body, "false")) == "{}"


def test_members_keep_the_models_order() -> None:
    assert arguments(*(parameter(name, "") for name in "zam")) == '{"z":"","a":"","m":""}'


@pytest.mark.parametrize("string", ["false", None])
def test_nested_parameters_are_objects(string: str | None) -> None:
    inner = parameter("b", "x") + "\n" + parameter("c", parameter("d", "1", "false"), None)
    got = arguments(parameter("a", f"\n{inner}\n", string), parameter("e", "y"))
    assert got == '{"a":{"b":"x","c":{"d":1}},"e":"y"}'


def test_nested_parameters_that_are_no_json_empty_the_arguments_too() -> None:
    assert arguments(parameter("a", parameter("b", "x", "false"), None)) == "{}"


def test_what_is_said_to_be_a_string_is_one_whatever_it_looks_like() -> None:
    text = block(call('<parameter name="a" string="true"><parameter name="b">x</parameter>'))
    calls = parse_reply(text, thinking=False).calls
    assert calls == (ToolCall("f", '{"a":"<parameter name=\\"b\\">x"}'),)


def test_deep_nesting_is_refused() -> None:
    deep = '<parameter name="a">' * 10_000 + "</parameter>" * 10_000
    assert parse_reply(block(call(deep)), thinking=False).malformed


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "x" + EMPTY_CALL,
        EMPTY_CALL + "x",
        call("x"),
        "<invoke></invoke>",
        "<invoke name=f></invoke>",
        call('<parameter string="true">x</parameter>'),
        call(parameter("a", "1", "false") + "x"),
        '<invoke name="f"><parameter name="a">x</invoke>',
    ],
)
def test_a_block_that_can_not_be_read_is_content_and_is_told(inner: str) -> None:
    text = f"ok {block(inner)}"
    assert parse_reply(text, thinking=False) == ParsedReply(text, malformed=True)


BROKEN = block(call(parameter("a", "x")), style=Marker.DSML)


@pytest.mark.parametrize("n_tags", [1, 2, 3])
def test_a_block_that_broke_off_is_closed(n_tags: int) -> None:
    cut = BROKEN
    for _ in range(n_tags):
        cut = cut[: cut.rindex("</")]
    reply = parse_reply(cut, thinking=False)
    assert reply.calls == (ToolCall("f", '{"a":"x"}'),)
    assert parse_reply(reply.block, thinking=False, repair=False) == parse_reply(
        cut, thinking=False
    )
    assert parse_reply(cut, thinking=False, repair=False) == ParsedReply(cut, malformed=True)


def test_a_block_is_repaired_wherever_it_broke_off_behind_its_first_value() -> None:
    for n_kept in range(BROKEN.index("x") + 1, len(BROKEN)):
        reply = parse_reply(BROKEN[:n_kept], thinking=False)
        assert reply.calls == (ToolCall("f", '{"a":"x"}'),), BROKEN[:n_kept]


def test_repair_adds_no_value_to_what_broke_off_before_one() -> None:
    for n_kept in range(len(f"<{D}tool_calls>"), BROKEN.index("x")):
        reply = parse_reply(BROKEN[:n_kept], thinking=False)
        assert reply.malformed or reply.calls in (
            (ToolCall("f", "{}"),),
            (ToolCall("f", '{"a":""}'),),
        )


def test_nested_parameters_that_broke_off_are_closed() -> None:
    cut = '<tool_calls><invoke name="f"><parameter name="a"><parameter name="b">x'
    assert parse_reply(cut, thinking=False).calls == (ToolCall("f", '{"a":{"b":"x"}}'),)


@pytest.mark.parametrize("text", ["", "no call", "</tool_calls>", "<tool_calls", "< tool_calls>"])
def test_text_without_a_block_is_content(text: str) -> None:
    assert parse_reply(text, thinking=False) == ParsedReply(text)


def test_reasoning_that_does_not_end_is_all_there_is() -> None:
    text = "hm " + block(EMPTY_CALL)
    assert parse_reply(text, thinking=True) == ParsedReply("", text)


def test_calls_count_only_behind_the_last_closing_tag() -> None:
    told = block(EMPTY_CALL)
    reply = parse_reply(f"hm {told}{THINK_END}ok {told}", thinking=True)
    assert (reply.reasoning, reply.content, len(reply.calls)) == (f"hm {told}", "ok", 1)
    for answer in (f"a{told}{THINK_END}b", f"a{THINK_END}{told}{THINK_END}b"):
        assert parse_reply(f"hm{THINK_END}{answer}", thinking=True) == ParsedReply(answer, "hm")


def test_without_thinking_the_closing_tag_is_text() -> None:
    reply = parse_reply(f"{block(EMPTY_CALL)}{THINK_END}", thinking=False)
    assert len(reply.calls) == 1


def test_long_hostile_texts_take_no_more_than_linear_time() -> None:
    for text in (
        "<tool_calls>" * 20_000,
        "<tool_calls><invoke" + " " * 200_000,
        "<tool_calls>" + '<invoke name="f"' * 20_000,
        block(call(*['<parameter name="a" string="true">x' * 20_000])),
        block(call(*[parameter("a", "x")] * 5_000)),
        "<" * 200_000,
    ):
        reply = parse_reply(text, thinking=False)
        assert reply.malformed or reply.calls or reply.content == text


TAGS = [
    *(f"<{D}tool_calls>", "<tool_calls>", f"</{D}tool_calls>", "</tool_calls>"),
    *('<invoke name="f">', "</invoke>", '<parameter name="a">', "</parameter>", THINK_END),
]
REPLIES = st.lists(st.sampled_from([*TAGS, *f" \n<{Marker.DSML}t&x"]), max_size=14).map("".join)


@given(REPLIES, st.booleans(), st.booleans())
def test_any_text_gives_a_reply(text: str, thinking: bool, repair: bool) -> None:
    reply = parse_reply(text, thinking=thinking, repair=repair)
    for found in reply.calls:
        assert isinstance(json.loads(found.arguments), dict)
    if not repair:
        shown = reply.content + reply.block
        whole = reply.reasoning + THINK_END * (thinking and THINK_END in text) + shown
        assert text.startswith(whole) if reply.calls else text == whole


@given(REPLIES, st.lists(st.integers(0, 60), max_size=8))
def test_any_cut_of_an_answer_gives_its_content(text: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    splitter, content = CallSplitter(), ""
    beginnings = [
        text.find(tag) for tag in ("<tool_calls>", *TAGS[:1], f"<{Marker.DSML[1:]}tool_calls>")
    ]
    begin = min((n for n in beginnings if n >= 0), default=None)
    expected = text if begin is None else text[:begin].rstrip()
    for start, end in pairwise(bounds):
        content += splitter.push(text[start:end])
        assert expected.startswith(content)
    assert content + splitter.finish() == expected
    style = None if begin is None else text[begin + 1 :].partition("tool_calls>")[0]
    closed = style is not None and f"</{style}tool_calls>" in text[begin:]
    assert splitter.complete == closed


def test_an_answer_is_held_back_only_where_a_block_may_begin() -> None:
    splitter = CallSplitter()
    returned = [splitter.push(piece) for piece in ("a ", "b\n\n", "<", "tool", "_x <b", "> ")]
    assert returned == ["a", " b", "", "", "\n\n<tool_x <b", ">"]
    assert splitter.finish() == " "


def test_the_end_of_the_block_is_told_at_its_last_character() -> None:
    text = block(EMPTY_CALL, style=Marker.DSML)
    splitter = CallSplitter()
    told = []
    for character in f"ok\n\n{text}":
        splitter.push(character)
        told.append(splitter.complete)
    assert told.index(True) == len(told) - 1
