"""Calls in the formats of chat templates: what models write, what they get wrong, any JSON."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4py.text.reply import ReplySplitter
from ds4py.text.tool_calls.formats import CallFormat, format_of
from tests.unit.text.replies import CUTS, Reading, cut, read


def known(template: str) -> CallFormat:
    """The format of a template that mentions tools."""
    found = format_of(f"tools {template}")
    assert found is not None
    return found


HERMES = known("<tool_call>")
MISTRAL = known("[TOOL_CALLS]")
LLAMA = known('{"name": function name, "parameters": dictionary')
FUNCTIONS = known("<tool_call> <function= <parameter=")


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


F = '{"name": "f", "arguments": {"a": [1, "x y"]}}'
G = '{"arguments": {"b" :null}, "id": ["7", {}], "name": "g"}'
FOUND = [("f", '{"a":[1,"x y"]}'), ("g", '{"b":null}')]
ALL = pytest.mark.parametrize(
    ("format_", "text"),
    [
        (HERMES, hermes(F, G)),
        (HERMES, hermes(F) + hermes(G)),
        (HERMES, hermes(f"[{F}, {G}]")),
        (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]"),
        (MISTRAL, f"[TOOL_CALLS]{F}[TOOL_CALLS]{G}"),
        (MISTRAL, '[TOOL_CALLS]f{"a": [1, "x y"]}[TOOL_CALLS] g {"b": null}'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a":[1,"x y"]}[TOOL_CALLS]g[CALL_ID]7[ARGS]{"b":null}'),
        (LLAMA, F.replace("arguments", "parameters") + "; " + G),
        (LLAMA, f"<|python_tag|>{F};{G}"),
        (LLAMA, f"{F}\n{G}"),
        (
            FUNCTIONS,
            '<tool_call>\n<function=f>\n<parameter=a>\n[1, "x y"]\n</parameter>\n</function>\n'
            "</tool_call>\n<tool_call>\n<function=g>\n<parameter=b>\nnull\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
    ],
)


@ALL
def test_calls_of_all_formats(format_: CallFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        reading = read(pieces, format_, ended=False)
        assert (reading.content, reading.calls) == ("", FOUND)
        assert (reading.called, reading.malformed) == (True, False)
        assert (reading.block, reading.complete) == (text, False)


@ALL
def test_what_follows_calls_does_not_count(format_: CallFormat, text: str) -> None:
    reading = read(list(f"{text}\n\nThat is it."), format_)
    assert (reading.calls, reading.block, reading.complete) == (FOUND, text, True)
    assert reading.content == ""


@ALL
def test_no_call_is_whole_before_its_end(format_: CallFormat, text: str) -> None:
    for n_kept in range(len(text) - len("</tool_call>")):
        reading = read([text[:n_kept]], format_, ended=False)
        assert reading.calls in ([], FOUND[:1], FOUND)
        if reading.called:
            assert text[:n_kept].startswith(reading.block)
            assert reading.calls
            assert reading.broken is None


@pytest.mark.parametrize("format_", [HERMES, MISTRAL, FUNCTIONS])
def test_text_before_calls_is_content(format_: CallFormat) -> None:
    opening = format_.tags[0][0]
    reading = read(list(f"So:\n\n{opening}{F}"), format_)
    assert (reading.content, reading.raw_block) == ("So:", f"\n\n{opening}{F}")


def test_a_closing_tag_that_is_missing_is_supplied_if_the_model_ended() -> None:
    text = hermes(F).removesuffix("call>")
    reading = read([text], HERMES)
    assert (reading.calls, reading.called, reading.block) == (FOUND[:1], True, hermes(F))
    assert not read([text], HERMES, ended=False).called


@pytest.mark.parametrize(
    "arguments", ['{"a": [1, "x y"]}', '"{\\"a\\": [1, \\"x y\\"]}"', '{\n"a" : [ 1,"x y" ]\t}']
)
@pytest.mark.parametrize("form", ['{"name":"f","arguments":%s}', '{"arguments":%s,"name":"f"}'])
def test_arguments_may_be_a_text_and_come_first(arguments: str, form: str) -> None:
    assert read(list(hermes(form % arguments)), HERMES).calls == FOUND[:1]


@pytest.mark.parametrize("call", ['{"name": "f"}', '{"name": "f", "arguments": null}'])
def test_arguments_may_be_missing(call: str) -> None:
    assert read(list(hermes(call)), HERMES).calls == [("f", "{}")]


def test_line_ends_in_a_string_are_escaped() -> None:
    call = '{"name": "f", "arguments": {"a": "1\n\t2\\n"}}'
    assert read(list(hermes(call)), HERMES).calls == [("f", '{"a":"1\\n\\t2\\n"}')]


@pytest.mark.parametrize(
    ("call", "begun"),
    [
        ("", 0),
        ("x", 0),
        ("{}", 0),
        ("[]", 0),
        ("{'name': 'f'}", 0),
        ('{"arguments": {}}', 0),
        ('{"name": 7}', 0),
        ('{"name": "\\ud800"}', 0),
        ('{"name": "f", "arguments": [1]}', 1),
        ('{"name": "f", "arguments": 7}', 1),
        ('{"name": "f", "arguments": "no"}', 1),
        ('{"name": "f", "arguments": {"a": 1,}}', 1),
        ('{"name": "f", "arguments": {"a": 1 2}}', 1),
        ('{"name": "f", "arguments": {"a": 1]}', 1),
        ('{"name": "f", "arguments": {"a": "\\x"}}', 1),
        ('{"name": "f", "arguments": {"a": "\\uab"}}', 1),
        ('{"name": "f", "arguments": {"a": nan}}', 1),
        ('{"name": "f", "arguments": {"a": 01}}', 1),
        ('{"name": "f", "arguments": {"a": ' + "[" * 9999 + "]" * 9999 + "}}", 1),
        ('{"name": "f", "arguments": {}} x', 1),
    ],
)
def test_what_can_not_be_read(call: str, begun: int) -> None:
    text = f"<tool_call>{call}</tool_call>"
    for pieces in ([text, " more"], [*text, "more"]):
        reading = read(pieces, HERMES)
        assert (reading.malformed, reading.called, reading.complete) == (True, False, True)
        assert (reading.raw_block, reading.block, reading.content) == (text, "", "")
        assert len(reading.calls) + (reading.broken is not None) == begun


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        ' {"name": "Ann", "age": 7} ',
        '{"name": "Ann"}',
        '{"name": "Ann", "age": 7, "parameters": {}}',
        '{"name": "Ann", "typ',
        "{}",
        "{",
        " ",
        '[{"name": "f", "parameters": {}}]',
        'So: {"name": "f", "parameters": {}}',
    ],
)
def test_an_answer_in_json_is_no_call(text: str) -> None:
    for ended in (True, False):
        for pieces in ([text], list(text)):
            assert read(pieces, LLAMA, ended=ended) == Reading(content=text)


def test_json_with_a_tag_is_a_call_or_malformed() -> None:
    assert read(['<|python_tag|>{"name": "Ann", "age": 7}'], LLAMA).calls == [("Ann", "{}")]
    assert read(["<|python_tag|>print(1)"], LLAMA).malformed
    assert read(['{"x": 1}<|python_tag|>' + F], LLAMA).calls == FOUND[:1]


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_a_name_before_arguments_has_a_size(name: str) -> None:
    text = f"[TOOL_CALLS]{name}[ARGS]{F}"
    assert read([text], MISTRAL).malformed
    assert read(list(text), MISTRAL).malformed


def test_untyped_values_are_json_where_they_are_and_text_elsewhere() -> None:
    values = {"a": "7", "b": '"7"', "c": " x\n y ", "d": "", "e": "nul", "f": '{"z": []}'}
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"
    ((name, arguments),) = read(list(text), FUNCTIONS).calls
    assert name == "f"
    assert json.loads(arguments) == {**values, "a": 7, "f": {"z": []}}
    assert read([text.replace("<function=f>", "<invoke>")], FUNCTIONS).malformed
    assert read([text.replace("</function>", "")], FUNCTIONS).malformed


def test_only_strings_of_arguments_are_free() -> None:
    reply, free = ReplySplitter(thinking=False, calls=HERMES), ""
    text = hermes('{"name": "f", "arguments": {"key": "va", "n": 12}}')
    for character in text:
        free += character if not reply.structural else " "
        reply.push(character)
    assert free.split() == ["<tool_call>", 'key"', 'va"', 'n"']


def test_long_strings_take_linear_time() -> None:
    """Quadratic time would be minutes."""
    long, lines, numbers = "x" * 100_000, "é\n" * 50_000, "1," * 9_000
    for value in (f'"{long}"', f'"{lines}"', f"[{numbers}1]"):
        text = hermes(f'{{"name": "f", "arguments": {{"a": {value}}}}}')
        pieces = cut(text, range(0, len(text), 20))
        assert read(pieces, HERMES) == read([text], HERMES)


KEYS = st.text(max_size=4)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "{", '"', "\\", "😀", "[TOOL_CALLS]", ";"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.text(max_size=4), st.dictionaries(KEYS, VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)


@given(CALLS, st.sampled_from([HERMES, MISTRAL, LLAMA]), st.booleans(), CUTS, st.booleans())
@example([("f", {"a": "😀\u2028"})], HERMES, True, list(range(99)), False)
def test_calls_that_are_written_are_read_back(
    calls: Any, format_: CallFormat, escaped: bool, cuts: list[int], spaced: bool
) -> None:
    written = [
        json.dumps(
            {"name": name, "arguments": given}, ensure_ascii=escaped, indent=1 if spaced else None
        )
        for name, given in calls
    ]
    opening, closing = format_.tags[0]
    text = opening + (opening if format_ is not LLAMA else ";").join(
        f"{call}{closing}" for call in written
    )
    reading = read(cut(text, cuts), format_)
    assert [(name, json.loads(arguments)) for name, arguments in reading.calls] == calls
    for (_, arguments), (_, values) in zip(reading.calls, calls, strict=True):
        assert arguments == json.dumps(values, ensure_ascii=escaped, separators=(",", ":"))
    assert (reading.called, reading.block) == (True, text)
