"""How an answer is shown: text on stdout, figures on stderr."""

from __future__ import annotations

import pytest

from ds4py.api.events import Figures, Piece
from ds4py.cli.chat.printing import Prefill, awaited, show

FIGURES = Figures(
    n_prompt=9,
    n_cached=4,
    n_generated=2,
    prefill_per_second=12.34,
    decode_per_second=5.0,
    finish="stop",
)


def test_text_goes_to_stdout_and_figures_to_stderr(capsys) -> None:
    events = iter([Piece("Hel", (1,)), Piece("lo", (2,)), FIGURES])
    assert show(events, ids_only=False) is FIGURES
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert err == (
        "prompt: 9 tokens (4 cached), answer: 2 tokens\nprefill: 12.3 t/s, generation: 5.0 t/s\n"
    )


def test_reasoning_is_plain_in_a_file_and_the_answer_begins_on_its_own_line(capsys) -> None:
    said = [
        Piece(reasoning="h"),
        Piece("", (1,)),
        Piece(reasoning="m"),
        Piece("Yes", (2,)),
        Piece(),
    ]
    show(iter([*said, Piece("!", (3,))]), ids_only=False)
    assert capsys.readouterr().out == "hm\nYes!\n"
    show(iter([Piece("Yes", (), "hm")]), ids_only=False)
    assert capsys.readouterr().out == "hm\nYes\n"
    show(iter([Piece(reasoning="hm")]), ids_only=False)
    assert capsys.readouterr().out == "hm\n"


def test_reasoning_is_dim_on_a_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(iter([Piece(reasoning="hm"), Piece("Yes")]), ids_only=False)
    assert capsys.readouterr().out == "\x1b[2mhm\x1b[0m\nYes\n"


def test_a_model_can_not_steer_the_terminal(capsys, monkeypatch) -> None:
    said = [Piece(reasoning="a\x1b]52;c;aGk=\x07"), Piece("b\x9b2J\r\tc\n")]
    show(iter(said), ids_only=False)
    assert capsys.readouterr().out == "a\x1b]52;c;aGk=\x07\nb\x9b2J\r\tc\n\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(iter(said), ids_only=False)
    shown = "\x1b[2ma\\x1b]52;c;aGk=\\x07\x1b[0m\nb\\x9b2J\\r\tc\n\n"
    assert capsys.readouterr().out == shown


def test_ids_are_separated_by_commas(capsys) -> None:
    show(iter([Piece("a", (1, 2)), Piece("", ()), Piece("b", (3,))]), ids_only=True)
    assert capsys.readouterr().out == "1,2,3\n"


def test_what_was_said_before_a_failure_stays_and_ends_with_a_line_break(capsys) -> None:
    def events():
        yield Piece("Hel")
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError):
        show(events(), ids_only=False)
    assert capsys.readouterr() == ("Hel\n", "")


def test_nothing_cached_is_not_mentioned(capsys) -> None:
    from dataclasses import replace

    show(iter([replace(FIGURES, n_cached=0)]), ids_only=False)
    assert "cached" not in capsys.readouterr().err


def test_an_answer_that_never_came_leaves_stdout_empty(capsys) -> None:
    def events():
        raise RuntimeError("refused")
        yield

    with pytest.raises(RuntimeError):
        show(events(), ids_only=False)
    assert capsys.readouterr() == ("", "")


def test_the_wait_for_an_answer_is_told_and_ends_before_its_first_piece() -> None:
    told: list[tuple[int, int]] = []
    events = awaited(
        iter([Prefill(8, 20), Prefill(16, 20), Piece("a"), Piece("b"), FIGURES]),
        lambda done, total: told.append((done, total)),
    )
    assert next(events) == Piece("a")
    assert told == [(8, 20), (16, 20), (20, 20)]
    assert list(events) == [Piece("b"), FIGURES]
    assert len(told) == 3
