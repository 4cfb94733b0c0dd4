"""Templates within limits: what they are given, what they may not do, how they end."""

import threading
from datetime import datetime

import pytest

from ds4py.text.chat_formats import sandbox
from ds4py.text.chat_formats.sandbox import (
    BoundedTemplate,
    TemplateFailedError,
    TemplateRefusalError,
)


def render(source: str, **variables: object) -> str:
    return BoundedTemplate(source).render(variables)


def test_blocks_leave_no_blank_lines_or_indentation() -> None:
    source = "{% for x in xs %}\n    {% if x %}\n{{ x }}\n    {% endif %}\n{% endfor %}"
    assert render(source, xs=[1, 0, 2]) == "1\n2\n"


def test_loops_can_be_left_early() -> None:
    source = "{% for x in xs %}{% if x > 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    assert render(source, xs=[1, 2, 3, 4]) == "12"


def test_the_training_mark_is_only_its_contents() -> None:
    assert render("a{% generation %}{{ x }}{% endgeneration %}c", x="b") == "abc"


def test_json_has_no_html_escapes_and_keeps_order_and_characters() -> None:
    value = {"z": "<é>&'", "a": [1, None, True]}
    assert render("{{ x | tojson }}", x=value) == '{"z": "<é>&\'", "a": [1, null, true]}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"


def test_text_is_not_escaped_for_html() -> None:
    assert render("{{ x }}", x="<a> & 'b'") == "<a> & 'b'"


def test_the_date_is_todays() -> None:
    before, text, after = datetime.now(), render("{{ strftime_now('%Y-%m-%d') }}"), datetime.now()
    assert text in {before.strftime("%Y-%m-%d"), after.strftime("%Y-%m-%d")}


def test_raise_exception_is_the_authors_refusal() -> None:
    with pytest.raises(TemplateRefusalError, match=r"^only one system message$"):
        render("{{ raise_exception('only one system message') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x",
        "{% include 'file' %}",
        "{{ x.y.z }}",
        "{{ 1 / 0 }}",
        "{{ x | no_such_filter }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ lst.append(1) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "(" * 20_000 + "{{ " + "(" * 20_000,
        "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
    ],
)
def test_what_is_broken_or_forbidden_fails(source: str) -> None:
    with pytest.raises(TemplateFailedError):
        render(source, lst=[])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_operators_and_ranges_that_explode_fail_before_they_do(source: str) -> None:
    with pytest.raises(TemplateFailedError):
        render(source)


@pytest.mark.parametrize(
    "doubled", ["s + s", "s ~ s", "[s, s] | join", "'{}{}'.format(s, s)", "s | replace('x', 'xx')"]
)
def test_repeated_doubling_is_bounded(doubled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_ITEMS", 1000)
    source = (
        "{% set ns = namespace(s='x') %}{% for i in range(n) %}"
        f"{{% set s = ns.s %}}{{% set ns.s = {doubled} %}}{{% endfor %}}{{{{ ns.s }}}}"
    )
    assert render(source, n=9) == "x" * 512
    with pytest.raises(TemplateFailedError, match="1000"):
        render(source, n=10)


def test_numbers_are_computed_as_usual() -> None:
    assert render("{{ 3 * 4 }} {{ 2 ** 5 }} {{ 1 + 2.5 }} {{ 2.5 * 2 }} {{ 'ab' * 2 }}") == (
        "12 32 3.5 5.0 abab"
    )


def test_texts_and_numbers_are_concatenated_as_written() -> None:
    assert render("{{ 'a' ~ 1 ~ x ~ none }}", x=2.5) == "a12.5None"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in xs %}{% for b in xs %}{% endfor %}{% endfor %}",
        "{% macro m() %}{% endmacro %}{% for a in xs %}{% for b in xs %}{{ m() }}"
        "{% endfor %}{% endfor %}",
        "{% for a in xs %}{% for b in xs %}{{ ''.strip() }}{% endfor %}{% endfor %}",
    ],
)
def test_steps_are_counted(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100)
    assert render(source, xs=[1, 2]) == ""
    with pytest.raises(TemplateFailedError, match="more than 100 steps"):
        render(source, xs=list(range(50)))


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", -1.0)
    with pytest.raises(TemplateFailedError, match="seconds"):
        render("{% for a in xs %}{% endfor %}", xs=[1])


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_OUTPUT", 10)
    source = "{% for a in xs %}xxx{{ a }}{% endfor %}"
    assert render(source, xs=[1, 2]) == "xxx1xxx2"
    with pytest.raises(TemplateFailedError, match="more than 10 characters"):
        render(source, xs=[1, 2, 3])


def test_the_source_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SOURCE", 10)
    with pytest.raises(TemplateFailedError, match="11 characters, more than 10"):
        BoundedTemplate("x" * 11)


def test_a_template_can_not_change_what_it_is_given() -> None:
    messages = [{"role": "user"}]
    with pytest.raises(TemplateFailedError):
        render("{% set _ = messages[0].update(role='system') %}", messages=messages)
    assert messages == [{"role": "user"}]


def test_threads_render_one_template_with_budgets_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 250)
    template = BoundedTemplate("{% for x in xs %}{{ x }}{% endfor %}")
    found: dict[int, set[str]] = {}

    def work(n: int) -> None:
        found[n] = {template.render({"xs": [n] * 100}) for _ in range(10)}

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {n: {str(n) * 100} for n in range(8)}
