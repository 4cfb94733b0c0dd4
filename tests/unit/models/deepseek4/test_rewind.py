"""Cutting timelines back, bit for bit as if the rest had never been; the rules of `LocalRunner`.

The same products must run for that, so a timeline and its twin get their tokens in the same spans.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds4py.activations import F32
from ds4py.config import ActQuant, EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.errors import ModelError
from ds4py.models.deepseek4.cache import REWIND_SLACK
from tests.support import golden
from tests.unit.models.deepseek4.support import N_CTX, Sessions, prompt, tiny

A, B = SessionId(1), SessionId(2)


@pytest.fixture(scope="module")
def opened() -> Iterator[LocalRunner]:
    runner = stage("cpu")
    yield runner
    runner.close()


@pytest.fixture
def runner(opened) -> Iterator[LocalRunner]:
    yield opened
    for session in (A, B):
        opened.drop(session)


def stage(mode: ActQuant) -> LocalRunner:
    config = EngineConfig(
        model=golden.path("tiny-a.gguf"),
        device="cpu",
        precision="f32",
        act_quant=mode,
        n_ctx=N_CTX,
        n_slots=2,
        threads=torch.get_num_threads(),
    )
    return open_runner(config)


def feed(
    runner: LocalRunner, session: SessionId, tokens: Sequence[int], *, reset: bool = False
) -> F32:
    """Evaluate one span; return the logits after its last token."""
    pos0 = 0 if reset else runner.length(session) or 0
    work = ForwardRequest(
        session=session,
        tokens=tuple(tokens),
        pos0=pos0,
        hidden=None,
        output_kind=OutputKind.LOGITS,
        reset=reset,
    )
    (answer,) = runner.run([work])
    assert isinstance(answer, ForwardOutput), answer
    assert answer.logits is not None
    return answer.logits


def go_on(runner: LocalRunner, session: SessionId) -> list[F32]:
    """Continue with the recorded prompt from where the session is, by a chunk and a token."""
    start = runner.length(session) or 0
    return [feed(runner, session, prompt()[start + a : start + b]) for a, b in ((0, 6), (6, 7))]


def other(n_tokens: int) -> list[int]:
    """Return tokens that the prompt does not have there."""
    return [700 - token % 600 for token in prompt()[:n_tokens]]


def assert_twins(runner: LocalRunner) -> None:
    """Check that both sessions hold the same and go on with the same logits."""
    lengths, parts = zip(*(runner.export_cache(session) for session in (A, B)), strict=True)
    assert lengths[0] == lengths[1]
    assert all(map(torch.equal, *parts))
    assert all(map(np.array_equal, go_on(runner, A), go_on(runner, B)))


CUTS = (
    *((41, 1), (42, 1), (40, 3)),  # inside a group of four
    *((1, 32), (4, 32), (36, 5), (19, 32)),  # across groups, back to the first one
    *((127, 1), (126, 32), (98, 32)),  # across 128 tokens
    *((128, 32), (161, 32), (255, 5)),  # rings that went round
)


@pytest.mark.parametrize(("mode", "single"), [("cpu", True), ("none", False)])
def test_timelines_go_on_as_if_the_rest_had_never_been(mode, single):
    """Many cuts at once, as sessions of one batch, on the model itself."""
    cuts = CUTS[::2] if single else CUTS
    kept = [length for length, _ in cuts]
    cut, twins = (Sessions(tiny(mode), len(cuts)) for _ in range(2))
    cut.feed(*(prompt()[:length] for length in kept))
    twins.caches = [[part.clone() for part in own] for own in cut.caches]
    twins.lengths = list(kept)
    size = 1 if single else REWIND_SLACK
    for start in range(0, REWIND_SLACK, size):
        cut.feed(*(other(more)[start : start + size] for _, more in cuts))
    cut.lengths = list(kept)
    for size in (1, 3, 9, 1):
        spans = [prompt()[length : length + size] for length in cut.lengths]
        assert torch.equal(cut.feed(*spans), twins.feed(*spans))
    for session in range(len(cuts)):
        assert all(map(torch.equal, cut.exported(session), twins.exported(session)))


@pytest.mark.parametrize(("kept", "more"), [(41, 2), (20, 32), (126, 32)])
def test_a_runner_cuts_a_timeline(runner, kept, more):
    for session in (A, B):
        feed(runner, session, prompt()[:kept])
    feed(runner, A, other(more))
    runner.rewind(A, kept)
    assert runner.length(A) == kept
    assert_twins(runner)


def test_two_rewinds_in_a_row_go_back_no_further_than_one(runner):
    for session in (A, B):
        feed(runner, session, prompt()[:66])
        feed(runner, session, other(2))
    feed(runner, A, other(32))
    runner.rewind(A, 80)
    with pytest.raises(ModelError, match="68 to 80"):
        runner.rewind(A, 67)
    runner.rewind(A, 68)
    assert_twins(runner)
    # 75 tokens now, but what the first 100 had overwritten is still gone
    with pytest.raises(ModelError, match="68 to 75"):
        runner.rewind(A, 67)


def test_the_floor_moves_on_with_the_timeline(runner):
    feed(runner, A, prompt()[:100])
    runner.rewind(A, 70)
    feed(runner, A, prompt()[70:110])
    with pytest.raises(ModelError, match=f"{110 - REWIND_SLACK} to 110"):
        runner.rewind(A, 77)
    runner.rewind(A, 78)
    assert runner.length(A) == 78


def test_a_short_timeline_can_be_cut_anywhere(runner):
    for session in (A, B):
        feed(runner, session, prompt()[:1])
    feed(runner, A, other(REWIND_SLACK))
    runner.rewind(A, 1)
    assert_twins(runner)
    runner.rewind(A, 0)
    assert runner.length(A) == 0


@pytest.mark.parametrize("too_far", [1, 35, -1, 69])
def test_a_refused_cut_changes_nothing(runner, too_far):
    for session in (A, B):
        feed(runner, session, prompt()[:68])
    with pytest.raises(ModelError):
        runner.rewind(A, too_far)
    assert runner.length(A) == 68
    assert_twins(runner)


@pytest.mark.parametrize("how", ["rewind", "reset"])
def test_a_timeline_that_begins_again_can_be_cut_anywhere(runner, how):
    feed(runner, A, prompt()[:200])
    if how == "rewind":
        runner.rewind(A, 0)
    feed(runner, A, prompt()[:30], reset=how == "reset")
    feed(runner, B, prompt()[:30])
    for session in (A, B):
        runner.rewind(session, 3)
    assert_twins(runner)


def test_an_imported_timeline_can_not_be_cut_below_what_was_saved(runner):
    feed(runner, A, prompt()[:60])
    runner.import_cache(B, *runner.export_cache(A))
    with pytest.raises(ModelError, match="60 to 60"):
        runner.rewind(B, 59)
    feed(runner, B, other(7))
    with pytest.raises(ModelError, match="60 to 67"):
        runner.rewind(B, 59)
    runner.rewind(B, 60)
    assert_twins(runner)


def test_an_import_replaces_a_longer_timeline(runner):
    feed(runner, A, prompt()[:60])
    feed(runner, B, prompt()[:200:-1])
    runner.import_cache(B, *runner.export_cache(A))
    assert runner.length(B) == 60
    assert_twins(runner)


def test_a_stage_says_that_it_can_not_cut_anywhere(runner):
    assert not runner.can_rewind


# --- logits ---------------------------------------------------------------------------------------


class Shapes(TorchDispatchMode):
    """Notes the shapes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.add(tuple(result.shape))
        return result


def test_point_40_a_prefill_computes_the_logits_of_its_last_token_only(runner):
    n_vocab = runner.card.n_vocab
    with Shapes() as shapes:
        logits = feed(runner, A, prompt()[:37])
    assert logits.shape == (n_vocab,)
    assert (1, n_vocab) in shapes.seen
    assert (37, n_vocab) not in shapes.seen
    assert (37, runner.card.hidden_width) in shapes.seen, "the states of all tokens are noted"
