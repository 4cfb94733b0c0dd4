"""The loop of a chat: commands, what is kept of answers, and that nothing ends it but its user."""

from __future__ import annotations

import io
from collections.abc import Generator
from pathlib import Path

import pytest

from ds4py.api.events import Event, Figures, Piece
from ds4py.cli.chat.conversation import ChatHistory, Progress, StageFigures, Status
from ds4py.cli.chat.line_input import PipedLines
from ds4py.cli.chat.loop import COMMANDS, WORDS, ChatLoop
from ds4py.errors import CapacityError, ConfigError, Ds4Error

FIGURES = Figures(
    n_prompt=9,
    n_cached=0,
    n_generated=2,
    prefill_per_second=1.0,
    decode_per_second=1.0,
    finish="stop",
)


class Scripted:
    """A partner that answers with prepared events, and remembers what it was asked."""

    def __init__(self, *answers: list[Event | BaseException]):
        self._answers = list(answers)
        self.asked: list[tuple[str, str | None, str | None, list[dict[str, str]]]] = []
        self.done: list[object] = []

    def reply(
        self, talk: ChatHistory, question: str, progress: Progress
    ) -> Generator[Event, None, None]:
        self.asked.append((question, talk.system, talk.think, list(talk.turns)))
        for event in self._answers.pop(0):
            if isinstance(event, BaseException):
                raise event
            yield event

    def forget(self) -> None:
        self.done.append("forget")

    def resize(self, n_ctx: int) -> None:
        if n_ctx > 5000:
            raise CapacityError("memory", needed=n_ctx, available=5000)
        self.done.append(n_ctx)

    def status(self) -> Status:
        stages = (
            StageFigures("coordinator", "layers 0-2", 12.5, 3.25),
            StageFigures("\x1b[2Jworker", "layers 3-5 + head", 0.0, 0.0),
        )
        return Status(model="toy", where="here", n_ctx=64, missing="layers 3-5", stages=stages)

    def close(self) -> None:
        self.done.append("closed")


def chat(
    typed: str, *answers: list[Event | BaseException], **talk: str | None
) -> tuple[Scripted, int]:
    partner = Scripted(*answers)
    lines = PipedLines(io.BytesIO(typed.encode()))
    return partner, ChatLoop(partner, lines, ChatHistory(**talk), program="prog").run()


def hello(*more: Event | BaseException) -> list[Event | BaseException]:
    return [Piece("", (1,), "hm"), Piece("Hel", (2,)), Piece("lo", (3,)), *more]


SAID = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "Hello", "reasoning_content": "hm"},
]


def test_answers_go_to_stdout_and_questions_bring_what_was_said(capsys) -> None:
    partner, status = chat("a\n\n  \nb\n", hello(FIGURES), hello(FIGURES), system="s", think="high")
    assert status == 0
    assert partner.asked == [("a", "s", "high", []), ("b", "s", "high", SAID)]
    out, err = capsys.readouterr()
    assert out == "hm\nHello\nhm\nHello\n"
    assert "Ctrl+D" in err


@pytest.mark.parametrize("cut", [KeyboardInterrupt(), ConfigError("lost"), FIGURES])
def test_what_was_said_before_the_end_is_kept(cut, capsys) -> None:
    partner, _ = chat("a\nb\n", hello(cut), [FIGURES])
    assert partner.asked[1] == ("b", None, None, SAID)


@pytest.mark.parametrize("said", [Piece("", (1,), "hm"), Piece("", (1,)), Piece(reasoning="hm")])
def test_half_a_thought_or_half_a_character_is_an_answer_too(said: Piece, capsys) -> None:
    partner, _ = chat("a\nb\n", [said, KeyboardInterrupt()], [FIGURES])
    assert [turn["content"] for turn in partner.asked[1][3]] == ["a", ""]


@pytest.mark.parametrize("cut", [KeyboardInterrupt(), ConfigError("lost"), FIGURES])
def test_a_question_without_an_answer_is_taken_back(cut, capsys) -> None:
    partner, _ = chat("a\nb\n", [Piece(), cut], [FIGURES])
    assert partner.asked[1] == ("b", None, None, [])
    assert "taken back" in capsys.readouterr().err


def test_the_status_is_that_of_the_last_turn(capsys) -> None:
    assert chat("a\n", hello(Ds4Error("a stage was lost")))[1] == 1
    assert "prog: a stage was lost\n" in capsys.readouterr().err
    assert chat("a\nb\n", [Ds4Error("lost")], hello(FIGURES))[1] == 0
    assert chat("a\n", hello(KeyboardInterrupt()))[1] == 0
    assert chat("/nonsense\n")[1] == 0


def test_a_bug_ends_the_chat() -> None:
    with pytest.raises(ZeroDivisionError):
        chat("a\n", [ZeroDivisionError()])


@pytest.mark.parametrize(
    ("command", "think"), [("/think", "high"), ("/think-max", "max"), ("/nothink", "none")]
)
def test_how_much_to_think_holds_for_later_turns(command: str, think: str, capsys) -> None:
    partner, _ = chat(f"a\n{command}\nb\n", hello(FIGURES), hello(FIGURES))
    assert [asked[2] for asked in partner.asked] == [None, think]


def test_another_system_text_holds_for_the_whole_conversation(capsys) -> None:
    partner, _ = chat("a\n/system  Be brief. \nb\n/system\nc\n", *[hello(FIGURES)] * 3, system="x")
    assert [asked[1] for asked in partner.asked] == ["x", "Be brief.", None]
    assert partner.done == ["forget", "forget"]
    assert len(partner.asked[2][3]) == 4


def test_a_file_is_asked(tmp_path: Path, capsys) -> None:
    path = tmp_path / "my question.txt"
    path.write_text("line 1\nline 2\n")
    partner, _ = chat(f"/read {path}\n/read {path}x\n/read\n", hello(FIGURES))
    assert [asked[0] for asked in partner.asked] == ["line 1\nline 2\n"]
    err = capsys.readouterr().err
    assert f"prog: /read {path}x: No such file" in err
    assert "prog: no file named" in err


def test_a_new_context_keeps_the_conversation_and_a_bad_one_changes_nothing(capsys) -> None:
    bad = ("/ctx", "/ctx abc", "/ctx 0", "/ctx -5", "/ctx 9999999999", "/ctx ٣")
    typed = "\n".join(["a", "/ctx 4096", *bad, "/ctx 6000", "b"])
    partner, status = chat(typed, hello(FIGURES), hello(FIGURES))
    assert (partner.done, status) == ([4096], 0)
    assert partner.asked[1][3] == SAID
    err = capsys.readouterr().err
    assert err.count("expected a number of tokens") == len(bad)
    assert "memory: needed 6000, available 5000" in err


def test_clearing_forgets(capsys) -> None:
    partner, _ = chat("a\n/clear\n/status\nb\n", hello(FIGURES), hello(FIGURES))
    assert partner.asked[1][3] == []
    assert partner.done == ["forget"]
    assert "context: 0 of 64 tokens used" in capsys.readouterr().err


def test_a_saved_conversation_goes_on(tmp_path: Path, capsys) -> None:
    path = tmp_path / "talk.json"
    chat(f"a\n/save {path}\n", hello(FIGURES))
    partner, _ = chat(f"/load {path}\nb\n/load nowhere.json\n", hello(FIGURES))
    assert partner.asked == [("b", None, None, SAID)]
    assert partner.done == ["forget"]
    assert "prog: nowhere.json: No such file" in capsys.readouterr().err


def test_the_status_names_stages_rates_and_what_is_used(capsys) -> None:
    chat("a\n/status\n", hello(FIGURES), think="none")
    err = capsys.readouterr().err
    assert "model: toy, here\ncontext: 11 of 64 tokens used\nthinking: none\n" in err
    assert "  coordinator: layers 0-2; prefill: 12.5 t/s, generation: 3.2 t/s\n" in err
    assert "  \\x1b[2Jworker: layers 3-5 + head" in err
    assert "missing: nobody serves layers 3-5\n" in err


@pytest.mark.parametrize("word", ["/quit", "/exit", "/quit now"])
def test_leaving(word: str) -> None:
    partner, status = chat(f"{word}\na\n")
    assert (partner.asked, status) == ([], 0)


def test_an_unknown_command_sends_nothing_and_a_space_before_it_does(capsys) -> None:
    partner, _ = chat("/etc/passwd\n/\n/ quit\n /etc?\n", hello(FIGURES))
    assert [asked[0] for asked in partner.asked] == [" /etc?"]
    err = capsys.readouterr().err
    assert "prog: /etc/passwd: no such command, nothing was sent" in err
    assert err.count("no such command") == 3


def test_help_lists_every_command(capsys) -> None:
    chat("/help\n/power 50\n")
    err = capsys.readouterr().err
    assert all(f"\n{usage}  " in err for usage in COMMANDS)
    assert "/power has no effect here" in err


@pytest.mark.parametrize("word", WORDS)
def test_every_word_that_is_offered_is_a_command(word: str, tmp_path: Path, capsys) -> None:
    partner, _ = chat(f"{word}\n")
    assert partner.asked == []
    assert "no such command" not in capsys.readouterr().err


def test_ctrl_c_over_a_pipe_ends_the_program() -> None:
    class Interrupted(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise KeyboardInterrupt

    lines = PipedLines(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        ChatLoop(Scripted(), lines, ChatHistory(), program="prog").run()
