"""DeepSeek V4's calls read back: what the renderer writes, what models do to it, and any text."""

import html
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4py.text.chat_formats.dsml import ToolCall, call_parts
from ds4py.text.reply import ReplySplitter
from ds4py.text.tokenizer.deepseek4_tokens import Marker
from ds4py.text.tool_calls.formats import DSML
from ds4py.text.tool_calls.tagged import blocks_in
from tests.unit.text.replies import CUTS, Reading, cut, read
from tests.unit.text.tool_calls.dsml_oracle import OracleError, content_and_calls

STYLES = pytest.mark.parametrize("style", [Marker.DSML.value, Marker.DSML.value[1:], ""])
ENTITIES = ("&amp;", "&lt;", "&gt;", "&quot;", "&apos;")
EMPTY_CALL = '<invoke name="f"></invoke>'
D = Marker.DSML


def block(*lines: str, style: str = "") -> str:
    """A block in one of the styles; lines are written plain."""
    text = "\n".join(["<tool_calls>", *lines, "</tool_calls>"])
    return text.replace("</", "\0").replace("<", f"<{style}").replace("\0", f"</{style}")


def call(*parameters: str, name: str = "f") -> str:
    return "".join([f'<invoke name="{name}">', *parameters, "</invoke>"])


def parameter(name: str, body: str, string: str | None = "true") -> str:
    attribute = "" if string is None else f' string="{string}"'
    return f'<parameter name="{name}"{attribute}>{body}</parameter>'


def parse(text: str, *, ended: bool = True) -> Reading:
    """Read a whole answer, which gives the same in one piece and character by character."""
    reading = read([text], DSML, ended=ended)
    assert reading == read(list(text), DSML, ended=ended)
    return reading


def arguments(*parameters: str) -> str:
    """What a single call with these parameters sends to the client."""
    reading = parse(block(call(*parameters)))
    assert [name for name, _ in reading.calls] == ["f"]
    assert reading.called
    return reading.calls[0][1]


def decoded(text: str) -> str:
    """A string as it comes back: the markup has no way to write an entity's own letters."""
    for entity in ENTITIES[1:]:
        text = text.replace(entity, html.unescape(entity))
    return text.replace("&amp;", "&")


NAMES = st.text(max_size=6) | st.text("<>&\"'ab &amp; \n", max_size=6)
AWKWARD = [
    *(f"</{D}parameter>", f'<{D}parameter name="x">', f"</{D}tool_calls>", "<tool_calls>"),
    *("\n", " ", "&", "<", "&lt", "</think>", "{", '"', "\\", "😀"),
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
CONTENTS = st.text(max_size=10).map(lambda text: text.replace("<", ""))


@given(CONTENTS, CALLS, st.booleans(), CUTS)
@example("x", [("f", {"a": f"</{D}parameter>", "b": [f"</{D}parameter>"]})], True, list(range(400)))
def test_calls_that_are_written_are_read_back(
    content: str, calls: Any, spaced: bool, cuts: Any
) -> None:
    separators = (" , ", " : ") if spaced else (",", ":")
    written = [
        ToolCall(name, json.dumps(given, ensure_ascii=spaced, separators=separators))
        for name, given in calls
    ]
    text = content + "".join(call_parts(written))
    reading = read(cut(text, cuts), DSML, ended=False)
    got = [(name, list(json.loads(arguments).items())) for name, arguments in reading.calls]
    expected = [
        (name, [(key, decoded(v) if isinstance(v, str) else v) for key, v in given.items()])
        for name, given in calls
    ]
    assert got == expected
    assert reading.complete
    assert reading.called
    assert (reading.content, reading.content + reading.block) == (content.rstrip(), text)


@given(CALLS)
def test_arguments_come_back_without_blanks(calls: Any) -> None:
    calls = [
        (name, {k: v for k, v in given.items() if not isinstance(v, str)}) for name, given in calls
    ]
    compact = [json.dumps(a, ensure_ascii=False, separators=(",", ":")) for _, a in calls]
    spaced = [ToolCall(n, json.dumps(a, ensure_ascii=False, indent=1)) for n, a in calls]
    end = f"</{D}parameter>"
    found = read(["".join(call_parts(spaced))], DSML).calls
    assert [text.replace("\\u003c" + end[1:], end) for _, text in found] == compact


@STYLES
def test_three_styles_are_read(style: str) -> None:
    text = "ok \n" + block(call(parameter("a", "x")), call(name="g"), style=style) + "\nmore"
    reading = parse(text)
    assert reading.calls == [("f", '{"a":"x"}'), ("g", "{}")]
    assert reading.content == "ok"
    assert reading.block == text.removeprefix("ok").removesuffix("\nmore")
    assert not reading.malformed


def test_the_first_tag_decides_the_style_of_all() -> None:
    inner = block(EMPTY_CALL, style=D)
    assert parse(f"{block(EMPTY_CALL)}{inner}").calls == [("f", "{}")]
    assert parse(f"<tool_calls>{inner}").malformed


def test_only_the_first_block_counts() -> None:
    assert parse(block(EMPTY_CALL) + block(call(name="g"))).calls == [("f", "{}")]


def test_blank_space_between_tags_does_not_matter() -> None:
    text = block('\n <invoke  name="f" >\n\n', parameter("a", " x\n"), " </invoke>\t")
    assert parse(text).calls == [("f", '{"a":" x\\n"}')]


@pytest.mark.parametrize("string", ["true", None, "yes"])
def test_strings_are_decoded_once(string: str | None) -> None:
    body = ' a &amp;&lt;&gt;&quot;&apos; &amp;lt; &nbsp; &#60; && " é &quo'
    assert (
        arguments(parameter("a", body, string))
        == '{"a":" a &<>\\"\' &lt; &nbsp; &#60; && \\" é &quo"}'
    )


def test_names_are_decoded() -> None:
    reading = parse(block(call(parameter("&lt;&quot;", "x"), name="a&amp;b")))
    assert reading.calls == [("a&b", '{"<\\"":"x"}')]


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


@pytest.mark.parametrize("body", ["x", "{", "1 2", '1,"b":2', "nan", "'a'", " &lt;", "[" * 9999])
def test_a_value_that_is_no_json_is_passed_on_as_text(body: str) -> None:
    got = arguments(parameter("z", "kept"), parameter("a", body, "false"))
    assert json.loads(got) == {"z": "kept", "a": body.replace("&lt;", "<")}


def test_members_keep_the_models_order() -> None:
    assert arguments(*(parameter(name, "") for name in "zam")) == '{"z":"","a":"","m":""}'


@pytest.mark.parametrize("string", ["false", None])
def test_nested_parameters_are_objects(string: str | None) -> None:
    inner = parameter("b", "x") + "\n" + parameter("c", parameter("d", "1", "false"), None)
    got = arguments(parameter("a", f"\n{inner}\n", string), parameter("e", "y"))
    assert got == '{"a":{"b":"x","c":{"d":1}},"e":"y"}'


def test_what_is_said_to_be_a_string_is_one_whatever_it_looks_like() -> None:
    text = block(call('<parameter name="a" string="true"><parameter name="b">x</parameter>'))
    assert parse(text).calls == [("f", '{"a":"<parameter name=\\"b\\">x"}')]


def test_a_string_may_spell_the_tags_of_blocks() -> None:
    body = f"{block(EMPTY_CALL)}</tool_calls>"
    assert json.loads(arguments(parameter("a", body))) == {"a": body}


def test_deep_nesting_is_refused() -> None:
    deep = '<parameter name="a">' * 10_000 + "</parameter>" * 10_000
    assert read([block(call(deep))], DSML).malformed


@pytest.mark.parametrize(
    ("inner", "broken"),
    [
        ("", None),
        ("x" + EMPTY_CALL, None),
        ("<invoke></invoke>", None),
        ("<invoke name=f></invoke>", None),
        ("<" + "x" * 5000 + ">", None),
        (call("x"), ("f", "")),
        (call('<parameter string="true">x</parameter>'), ("f", "")),
        (call(parameter("a", "1", "false") + "x"), ("f", '{"a":1')),
    ],
)
def test_a_block_that_can_not_be_read_is_no_content_and_is_told(
    inner: str, broken: tuple[str, str] | None
) -> None:
    text = f"ok {block(inner)}"
    reading = parse(text + "and more")
    assert (reading.content, reading.calls, reading.broken) == ("ok", [], broken)
    assert (reading.malformed, reading.called, reading.complete) == (True, False, True)
    assert (reading.raw_block, reading.block) == (text.removeprefix("ok"), "")
    assert reading == parse(text, ended=False)


def test_calls_before_what_can_not_be_read_are_whole() -> None:
    reading = parse(block(EMPTY_CALL + "x"))
    assert (reading.calls, reading.malformed, reading.called) == ([("f", "{}")], True, False)


def test_a_block_whose_string_is_not_closed_is_told_when_the_model_ends() -> None:
    text = block('<invoke name="f"><parameter name="a">x</invoke>')
    assert parse(text).malformed
    assert parse(text + "\n").malformed
    reading = parse(text, ended=False)
    assert (reading.malformed, reading.complete) == (False, False)


BROKEN = block(call(parameter("a", "x")), style=D)


@pytest.mark.parametrize("n_tags", [1, 2, 3])
def test_a_block_that_broke_off_is_closed(n_tags: int) -> None:
    text = BROKEN
    for _ in range(n_tags):
        text = text[: text.rindex("</")]
    reading = parse(text)
    assert (reading.calls, reading.called) == ([("f", '{"a":"x"}')], True)
    assert parse(reading.block, ended=False).calls == reading.calls
    assert reading.block.startswith(text)


@pytest.mark.parametrize("n_tags", [1, 2, 3])
def test_what_a_limit_cut_off_is_not_closed(n_tags: int) -> None:
    text = BROKEN
    for _ in range(n_tags):
        text = text[: text.rindex("</")]
    reading = parse(f"so\n{text}", ended=False)
    assert (reading.content, reading.called, reading.malformed) == ("so", False, False)
    assert (reading.block, reading.raw_block) == ("", f"\n{text}")
    if n_tags > 1:
        assert reading.broken is not None


def test_a_block_is_repaired_wherever_it_broke_off_behind_its_first_value() -> None:
    for n_kept in range(BROKEN.index("x") + 1, len(BROKEN)):
        reading = parse(BROKEN[:n_kept])
        assert reading.calls == [("f", '{"a":"x"}')], BROKEN[:n_kept]


def test_repair_adds_no_value_to_what_broke_off_before_one() -> None:
    for n_kept in range(len(f"<{D}tool_calls>"), BROKEN.index("x")):
        reading = parse(BROKEN[:n_kept])
        assert reading.malformed or reading.calls in ([("f", "{}")], [("f", '{"a":""}')])


def test_nested_parameters_that_broke_off_are_closed() -> None:
    text = '<tool_calls><invoke name="f"><parameter name="a"><parameter name="b">x'
    assert parse(text).calls == [("f", '{"a":{"b":"x"}}')]


@pytest.mark.parametrize("text", ["", "no call", "</tool_calls>", "<tool_calls", "< tool_calls>"])
def test_text_without_a_block_is_content(text: str) -> None:
    assert parse(text) == Reading(content=text)


def test_a_string_is_passed_on_as_it_comes_and_a_header_with_its_tag() -> None:
    reply = ReplySplitter(thinking=False, calls=DSML)
    tag = f'<{D}parameter name="a" string="true">'
    tokens = [
        f'<{D}tool_calls>\n<{D}invoke name="f">',
        tag,
        "O",
        "s",
        "&",
        "lt",
        ";",
        "<",
        "x",
        "</",
    ]
    tokens += [D, "parameter", ">", f"</{D}invoke>", f"</{D}tool_calls>"]
    told = ["".join(getattr(part, "text", ".") for part in reply.push(t)) for t in tokens]
    assert told == [
        *(".", '{"a":"', "O", "s", "", "", "<", "", "<x", "", "", "", '"', "}.", ""),
    ]


def test_only_the_words_of_the_model_are_free() -> None:
    reply, free = ReplySplitter(thinking=False, calls=DSML), ""
    inner = call(parameter("a", "xy"), parameter("b", '[1,"\\\\z\\"y"]', "false"))
    text = "ok" + block(inner, style=D)
    for character in text:
        free += " " if reply.structural else character
        reply.push(character)
    assert not reply.structural
    opening = text.index("<invoke".replace("<", f"<{D}"))
    assert free[:opening] == text[:opening].rstrip("\n") + " "
    assert free[opening:].split() == ["xy</\uff5c", '\\\\z\\"y"']


def test_long_hostile_texts_take_no_more_than_linear_time() -> None:
    """Quadratic time would be minutes."""
    n = 100_000
    for text in (
        "<tool_calls>" * (n // 10),
        "<tool_calls><invoke" + " " * n,
        "<tool_calls>" + " " * n,
        "<tool_calls>" + '<invoke name="f"' * (n // 10),
        block(call(*['<parameter name="a" string="true">x' * (n // 30)])),
        block(call(*[parameter("a", "x")] * (n // 50))),
        block(call(parameter("a", "\\" * n, "false"))),
        block(call(parameter("a", "&" * n))),
        block(call(parameter("a", "</" * (n // 2)))),
        block(call(parameter("a", " " * n, None))),
        "<" * n,
    ):
        pieces = cut(text, range(0, len(text), 50))
        assert read(pieces, DSML, ended=False) == read([text], DSML, ended=False)


TAGS = [
    *(f"<{D}tool_calls>", "<tool_calls>", f"</{D}tool_calls>", "</tool_calls>"),
    *('<invoke name="f">', "</invoke>", '<parameter name="a">', "</parameter>", "</think>"),
    *('<parameter name="b" string="false">', '<parameter name="c" string="true">'),
]
REPLIES = st.lists(st.sampled_from([*TAGS, *f" \n<{D}t&x1"]), max_size=14).map("".join) | st.lists(
    st.sampled_from([*TAGS[4:], *' "&1x\n']), max_size=14
).map(lambda inner: "<tool_calls>" + "".join(inner) + "</invoke></tool_calls>")


@given(REPLIES, CUTS, st.booleans())
def test_any_cut_of_any_text_gives_the_same_and_loses_nothing(
    text: str, cuts: list[int], ended: bool
) -> None:
    reading = read([text], DSML, ended=ended)
    assert read(cut(text, cuts), DSML, ended=ended) == reading
    shown = reading.content + reading.raw_block
    assert text.startswith(shown) if reading.complete else text == shown
    if reading.called:
        assert reading.block.startswith(reading.raw_block)
        assert reading.block == reading.raw_block or ended


@given(REPLIES, CUTS)
@example(
    '<tool_calls><invoke name="f"><parameter name="a">\n<x</parameter></invoke></tool_calls>', []
)
def test_the_stream_calls_what_the_whole_answer_says(text: str, cuts: list[int]) -> None:
    reading = read(cut(text, cuts), DSML, ended=False)
    try:
        content, calls, block_ = content_and_calls(text)
    except OracleError:
        assert not reading.called
    else:
        assert (reading.content, reading.calls, reading.block) == (content, calls, block_)
        assert reading.called == bool(calls)


def test_the_blocks_of_a_prompt_are_found_with_their_white_space() -> None:
    blocks = ["\n\n" + block(EMPTY_CALL, style=D), block(call(name="g"))]
    prompt = f"a </tool_calls>{blocks[0]}b{D}<tool_calls>{blocks[1]}c<{D}tool_calls>"
    assert blocks_in(prompt) == blocks
    assert blocks_in("") == []
