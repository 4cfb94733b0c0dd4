"""A short campaign against every target, every input that once did harm, and the fuzzer itself.

Longer campaigns: `./tools/fuzz --seconds 600 --seed 2`. An input that does harm belongs, once it is
understood, into `tests/golden/fuzz` under the name of its target, a hyphen and what it shows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from interop.fuzz import __main__ as command
from interop.fuzz import campaign as campaign_module
from interop.fuzz.__main__ import TARGETS, main
from interop.fuzz.campaign import Campaign, Tally
from interop.fuzz.live import Live
from interop.fuzz.target import Target
from tests.support import golden

REGRESSIONS = sorted((golden.ROOT / "fuzz").glob("*.bin"))
LIVE_NAMES = {name for name, target in TARGETS.items() if issubclass(target, Live)}
# of a campaign that reaches nothing but the first check there would be two
LEAST_OUTCOMES = dict.fromkeys(TARGETS, 6) | {"relay": 2, "door": 3, "answers": 2, "http": 5}


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_campaign_finds_nothing(name: str, tmp_path: Path) -> None:
    frames = 150 if name in LIVE_NAMES else 8000
    tally = Campaign(TARGETS[name](), seed=1, keep=tmp_path).run(seconds=20, frames=frames)
    assert tally.failures == []
    assert tally.n_frames >= frames
    assert len(tally.outcomes) >= LEAST_OUTCOMES[name]
    assert (tally.n_checks > 1) == (name in LIVE_NAMES)


@pytest.mark.parametrize("file", REGRESSIONS, ids=lambda file: file.stem)
def test_what_once_did_harm_does_none(file: Path, tmp_path: Path) -> None:
    target = TARGETS[file.name.partition("-")[0]]()
    assert Campaign(target, seed=0, keep=tmp_path).repeat([file.read_bytes()]).failures == []


@pytest.mark.parametrize("name", TARGETS)
def test_a_seed_makes_the_same_inputs_again_and_another_one_others(name: str) -> None:
    def inputs(seed: int) -> list[bytes]:
        rng, target = Random(seed), TARGETS[name]()
        return [target.make(rng) for _ in range(50)]

    assert inputs(1) == inputs(1)
    assert inputs(1) != inputs(2)


# --- the fuzzer finds what it looks for ----------------------------------------------------------


class Brittle(Target):
    """Bears every input but those that begin with a zero."""

    name = "brittle"
    deadline = 0.1
    sample_every = 1
    check_every = 4

    def __init__(self, harm: str):
        self._harm = harm
        self._is_harmed = False
        self.n_opened = 0

    def _make(self, rng: Random) -> bytes:
        return rng.randbytes(2)

    def _open(self) -> None:
        self._is_harmed = False
        self.n_opened += 1

    def _feed(self, data: bytes) -> Sequence[str]:
        if data[0]:
            return ["fine"]
        match self._harm:
            case "raise":
                raise KeyError("missing")
            case "hang":
                while True:
                    time.sleep(0.01)
            case "swallow":
                while True:  # as the loop of a thread that must go on does
                    try:
                        time.sleep(0.01)
                    except Exception:  # noqa: BLE001
                        continue
            case "hoard":
                assert bytes(1 << 20)
            case "die":
                self._is_harmed = True
        return []

    def _check(self) -> None:
        assert not self._is_harmed, "no answer"


def harmed(harm: str, keep: Path) -> tuple[Brittle, Tally]:
    target = Brittle(harm)
    return target, Campaign(target, seed=1, keep=keep).run(seconds=20, frames=2000)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("raise", "KeyError: 'missing'"),
        ("hang", "Hang: not done in time"),
        ("swallow", "Hang: not done in time"),
        ("hoard", "took 1048"),
    ],
)
def test_harm_is_told_and_its_input_fails_again(harm: str, words: str, tmp_path: Path) -> None:
    _, tally = harmed(harm, tmp_path)
    assert 0 < len(tally.failures) <= campaign_module.MAX_FAILURES
    assert all(words in failure for failure in tally.failures)
    files = sorted(tmp_path.glob("brittle-seed1-*.bin"))
    assert len(files) == len(tally.failures)
    assert all(file.read_bytes()[0] == 0 for file in files)
    assert words.partition(":")[0] in next(tmp_path.glob("*.txt")).read_text()
    again = Campaign(Brittle(harm), seed=1, keep=tmp_path / "again").repeat([files[0].read_bytes()])
    assert words in again.failures[0]


def test_a_target_that_no_longer_answers_is_told_with_the_inputs_before(tmp_path: Path) -> None:
    target, tally = harmed("die", tmp_path)
    assert "AssertionError: no answer" in tally.failures[0]
    assert target.n_opened == 1 + len(tally.failures)
    for n in range(1, 1 + len(tally.failures)):
        story = sorted(tmp_path.glob("*.txt"))[n - 1].stem
        recent = [file.read_bytes() for file in tmp_path.glob(f"{story}-*.bin")]
        assert len(recent) == Brittle.check_every
        assert any(data[0] == 0 for data in recent)


def test_growing_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([1 << 30, (1 << 30) + (65 << 20)])
    monkeypatch.setattr(campaign_module, "_resident", lambda: next(sizes))
    _, tally = harmed("none", tmp_path)
    assert "resident memory has grown by" in tally.failures[0]


def test_the_command_shows_a_table_and_repeats_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(command.TARGETS, "brittle", lambda: Brittle("raise"))
    keep = ["--keep", str(tmp_path)]
    assert main(["--frames", "50", "--target", "frames", *keep]) == 0
    assert main(["--frames", "2000", "--target", "frames", "brittle", *keep]) == 1
    shown = capsys.readouterr().out
    assert "0 failures" in shown
    assert "repeat: python -m interop.fuzz --repeat" in shown
    files = [str(file) for file in tmp_path.glob("*.bin")]
    assert main(["--repeat", *files, *keep]) == 1
    assert "KeyError" in capsys.readouterr().out
