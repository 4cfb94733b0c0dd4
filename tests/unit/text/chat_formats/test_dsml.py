"""Tools on offer and past calls as DeepSeek V4 reads them."""

import pytest

from ds4py.errors import RequestError
from ds4py.text.chat_formats.dsml import ToolCall, call_parts, exact_parts, preamble_parts
from ds4py.text.tokenizer.deepseek4_tokens import Marker

END = f"</{Marker.DSML}parameter>"


def written(name: str, arguments: str) -> list[str]:
    """The lines of a single call, without the tags around it and with markers left out."""
    lines = "".join(call_parts([ToolCall(name, arguments)])).replace(Marker.DSML, "").split("\n")
    assert lines[:3] == ["", "", "<tool_calls>"]
    assert lines[-2:] == ["</invoke>", "</tool_calls>"]
    return lines[3:-2]


def parameter(name: str, value: str, string: str = "true") -> str:
    return f'<parameter name="{name}" string="{string}">{value}</parameter>'


def test_calls_have_the_documented_form() -> None:
    calls = [ToolCall("weather", '{"city": "Oslo", "days": 3}'), ToolCall("now", "{}")]
    d = Marker.DSML
    assert "".join(call_parts(calls)) == (
        f'\n\n<{d}tool_calls>\n<{d}invoke name="weather">\n'
        f'<{d}parameter name="city" string="true">Oslo</{d}parameter>\n'
        f'<{d}parameter name="days" string="false">3</{d}parameter>\n'
        f'</{d}invoke>\n<{d}invoke name="now">\n</{d}invoke>\n</{d}tool_calls>'
    )


def test_each_tag_holds_one_marker_and_values_hold_none() -> None:
    value = f"{Marker.USER}{Marker.DSML}<think>"
    parts = call_parts([ToolCall(value, f'{{"{value}":"{value}","b":["{value}"]}}')])
    assert [part for part in parts if isinstance(part, Marker)] == [Marker.DSML] * 8


def test_parameters_keep_the_clients_order() -> None:
    assert [line[17] for line in written("f", '{"z":1,"a":2,"m":3}')[1:]] == list("zam")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1.00", "1.00"),
        ("12345678901234567890.5e-3", "12345678901234567890.5e-3"),
        ("null", "null"),
        ("true", "true"),
        (' { "a"\t: [ 1 ,\r\n "b  c" ] } ', '{"a":[1,"b  c"]}'),
        ('["\\u00e9\\" x"]', '["\\u00e9\\" x"]'),
        ("[]", "[]"),
    ],
)
def test_other_values_are_the_clients_own_json_without_blanks(value: str, text: str) -> None:
    assert written("f", f'{{"a":{value}}}')[1:] == [parameter("a", text, "false")]


def test_strings_are_decoded_and_otherwise_left_alone() -> None:
    line = written("f", '{"a": "<b> && \\"\\u00e9\\\\ &amp;"}')[1]
    assert line == parameter("a", '<b> && "é\\ &amp;')


def test_only_the_closing_tag_is_escaped_in_values() -> None:
    text = "".join(call_parts([ToolCall("f", f'{{"a":"x{END}y","b":["{END}"]}}')]))
    assert f'string="true">x&lt;{END[1:]}y{END}' in text
    assert f'string="false">["\\u003c{END[1:]}"]{END}' in text


def test_names_are_escaped_as_attributes() -> None:
    lines = written('a<b>&"c', '{"<&>\\"\'": 1}')
    assert lines[0] == '<invoke name="a&lt;b&gt;&amp;&quot;c">'
    assert lines[1] == parameter("&lt;&amp;&gt;&quot;'", "1", "false")


@pytest.mark.parametrize("arguments", ["", "x", "[1]", '"a"', '{"a":', '{"a":nan}', "[" * 9999])
def test_arguments_that_are_no_object_become_one_parameter(arguments: str) -> None:
    assert written("f", arguments)[1:] == [parameter("arguments", arguments)]


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"a": 1.0}', '{"a": 1.0}'), ({"a": "é"}, '{"a": "é"}'), ([1], "[1]")]
)
def test_arguments_of_a_message_are_a_text_or_a_value(arguments: object, text: str) -> None:
    item = {"function": {"name": "f", "arguments": arguments}}
    assert ToolCall.from_message(item) == ToolCall("f", text)


def test_remembered_words_are_kept_to_the_letter() -> None:
    block = f"\n<{Marker.DSML}tool_calls>{Marker.EOS}"
    parts = exact_parts(block)
    assert "".join(parts) == block
    assert [part for part in parts if isinstance(part, Marker)] == [Marker.DSML]


def test_schemas_are_listed_one_a_line_as_the_client_wrote_them() -> None:
    tools = [
        '{"type":"function", "function": {"name" : "a",  "n":1.0}}',
        '{"name":"b", "input_schema":{}}',
        {"type": "function", "function": {"name": "é"}},
        {"name": "d"},
    ]
    text = "".join(preamble_parts(tools))
    schemas = text.partition("### Available Tool Schemas\n\n")[2].partition("\n\nYou MUST")[0]
    assert schemas.split("\n") == [
        '{"name" : "a",  "n":1.0}',
        '{"name":"b", "input_schema":{}}',
        '{"name": "é"}',
        '{"name": "d"}',
    ]


def test_the_rules_are_the_publishers_with_the_changes_of_ds4() -> None:
    text = "".join(preamble_parts(["{}"])).replace(Marker.DSML, "DSML:")
    assert text.startswith(
        "## Tools\n\nYou have access to a set of tools to help answer the user question. "
    )
    assert '\n\n<DSML:tool_calls>\n<DSML:invoke name="$TOOL_NAME">\n' in text
    assert 'should be specified as raw text and set `string="true"`. ' in text
    assert "`>`, `&` and `&&`" in text
    assert "`</DSML:parameter>`: begin it with `&lt;`" in text
    assert text.endswith(
        "parameter schemas to invoke tool calls. Name parameters exactly as their schema does."
    )


def test_the_tags_of_the_rules_are_tokens() -> None:
    parts = preamble_parts([f'{{"name":"{Marker.DSML}<think>"}}'])
    counts = {marker: sum(part is marker for part in parts) for marker in Marker}
    assert {marker: n for marker, n in counts.items() if n} == {
        Marker.DSML: 10, Marker.THINK: 2, Marker.THINK_END: 2
    }  # fmt: skip


@pytest.mark.parametrize("tool", ["", "x", "[]", "7", None, 7, ["{}"], "{"])
def test_a_tool_that_is_no_object_is_the_clients_error(tool: object) -> None:
    with pytest.raises(
        RequestError, match=r"^tools\[1\]: got .*, expected a JSON object"
    ) as caught:
        preamble_parts(["{}", tool])
    assert (caught.value.status, caught.value.param) == (400, "tools")
