"""One stage: sessions, checks, answers."""

import numpy as np
import pytest

from ds4py.activations import HiddenBatch
from ds4py.config import EngineConfig
from ds4py.contracts import ForwardOutput, ForwardRequest, OutputKind, SessionId
from ds4py.engine import LocalRunner, open_runner
from ds4py.errors import CapacityError, ModelError
from ds4py.layer_range import LayerSpec
from tests.toys import toy_llama

A, B, C = SessionId(1), SessionId(2), SessionId(3)
HELLO = (5, 80, 7, 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toy_llama(tmp_path_factory.mktemp("toy") / "m.gguf", n_ctx=32, tied=False)


@pytest.fixture
def runner(model):
    opened = stage(model)
    yield opened
    opened.close()


def stage(model, layers: str | None = None, *, want_head: bool = False, **options) -> LocalRunner:
    config = EngineConfig(model=model, precision="f32", threads=1, n_slots=2, **options)
    span = LayerSpec.parse(layers) if layers else None
    return open_runner(config, span, want_head=want_head)


def work(
    tokens=HELLO, pos0=0, session=A, want=OutputKind.LOGITS, hidden=None, **rest
) -> ForwardRequest:
    return ForwardRequest(
        session=session, tokens=tuple(tokens), pos0=pos0, hidden=hidden, output_kind=want, **rest
    )


def one(runner: LocalRunner, item: ForwardRequest) -> ForwardOutput:
    (answer,) = runner.run([item])
    assert isinstance(answer, ForwardOutput), answer
    return answer


def refusal(runner: LocalRunner, item: ForwardRequest) -> Exception:
    (answer,) = runner.run([item])
    assert isinstance(answer, Exception)
    return answer


def test_a_span_is_answered_as_wanted(runner):
    nothing = one(runner, work(want=OutputKind.NOTHING))
    assert nothing.hidden is nothing.logits is None
    states = one(runner, work(want=OutputKind.HIDDEN, reset=True, reply_bits=16)).hidden
    assert (states.rows, states.width, states.bits) == (4, 64, 16)
    logits = one(runner, work(reset=True)).logits
    assert logits.shape == (279,)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("n_logits", [1, 2, 5])
def test_logits_of_several_rows_are_those_of_spans_that_end_there(runner, n_logits):
    tokens = (5, 80, 3, 41, 9)
    many = work(tokens, reset=True, n_logits=n_logits)
    whole = one(runner, many).logits
    rows = np.atleast_2d(whole)
    assert len(rows) == n_logits
    for end, row in enumerate(rows, len(tokens) - n_logits + 1):
        alone = one(runner, work(tokens[:end], session=B, reset=True)).logits
        np.testing.assert_allclose(row, alone, rtol=1e-5, atol=1e-5)
    together = runner.run([many, work((9,), session=B, reset=True)])
    np.testing.assert_array_equal(together[0].logits, whole)
    assert together[1].logits.ndim == 1


@pytest.mark.parametrize("n_logits", [0, 3])
def test_more_rows_than_there_are_have_no_logits(runner, n_logits):
    assert "rows with logits" in str(refusal(runner, work((1, 2), n_logits=n_logits)))


def test_evaluation_takes_time_and_says_so(runner):
    assert one(runner, work()).eval_usec > 0


def test_sessions_do_not_see_each_other_and_answers_keep_their_order(runner):
    alone = one(runner, work((9,), session=A)).logits
    runner.drop(A)
    outputs = runner.run([work(session=A), work((9,), session=B)])
    assert np.array_equal(outputs[1].logits, alone)
    assert not np.array_equal(outputs[0].logits, alone)
    assert (runner.length(A), runner.length(B)) == (4, 1)


def test_one_error_disturbs_no_other_span(runner):
    bad, good = runner.run([work(pos0=3), work(session=B)])
    assert isinstance(bad, ModelError)
    assert isinstance(good, ForwardOutput)
    assert runner.length(A) is None


def test_a_continued_session_equals_one_span(runner):
    whole = one(runner, work()).logits
    one(runner, work(HELLO[:3], session=B, want=OutputKind.NOTHING))
    last = one(runner, work(HELLO[3:], pos0=3, session=B)).logits
    assert np.allclose(whole, last, atol=1e-4)


def test_logits_belong_to_the_receiver(runner):
    first = one(runner, work()).logits
    kept = first.copy()
    one(runner, work((1, 2), pos0=4))
    assert np.array_equal(first, kept)


def test_a_wrong_position_is_refused_and_changes_nothing(runner):
    one(runner, work())
    for pos0 in (0, 3, 5):
        assert "expected 4" in str(refusal(runner, work((1,), pos0=pos0)))
    assert "expected 0" in str(refusal(runner, work((1,), pos0=4, reset=True)))
    assert runner.length(A) == 4


def test_reset_starts_again(runner):
    first = one(runner, work()).logits
    one(runner, work((1, 2, 3), pos0=4))
    assert np.array_equal(one(runner, work(reset=True)).logits, first)
    assert runner.length(A) == 4


def test_rewind_forgets_the_tail(runner):
    one(runner, work())
    expected = one(runner, work((9,), pos0=4)).logits
    one(runner, work((1, 2, 3), pos0=5, want=OutputKind.NOTHING))
    runner.rewind(A, 4)
    assert runner.length(A) == 4
    assert np.array_equal(one(runner, work((9,), pos0=4)).logits, expected)


@pytest.mark.parametrize(("session", "n_tokens"), [(A, 5), (A, -1), (B, 0)])
def test_rewind_beyond_what_is_held_is_refused(runner, session, n_tokens):
    one(runner, work())
    with pytest.raises(ModelError, match="rewind"):
        runner.rewind(session, n_tokens)


@pytest.mark.parametrize("kv_type", ["auto", "bf16", "f16", "q8_0"])
@pytest.mark.parametrize("before", [(), (9, 9), tuple(range(20))])
@pytest.mark.parametrize("n_tokens", [0, 1, 3, 4])
def test_a_fork_goes_on_to_the_last_bit_like_the_original(model, kv_type, before, n_tokens):
    runner = stage(model, kv_type=kv_type)
    one(runner, work())
    if before:
        one(runner, work(before, session=B))
    runner.fork(A, B, n_tokens)
    assert (runner.length(A), runner.length(B)) == (4, n_tokens)
    rest = (*HELLO, 9, 30)[n_tokens:]
    copied = one(runner, work(rest, pos0=n_tokens, session=B)).logits
    kept = one(runner, work((9, 30), pos0=4)).logits  # the original has lost nothing
    runner.rewind(A, n_tokens)
    expected = one(runner, work(rest, pos0=n_tokens)).logits
    assert np.array_equal(copied, expected)
    assert np.allclose(copied, kept, atol=1e-3 if kv_type == "auto" else 1.0)
    runner.close()


@pytest.mark.parametrize(("source", "n_tokens"), [(A, 5), (A, -1), (B, 0), (C, 1)])
def test_a_fork_of_what_is_not_held_changes_nothing(runner, source, n_tokens):
    one(runner, work())
    with pytest.raises(ModelError, match="fork of session"):
        runner.fork(source, B, n_tokens)
    assert (runner.length(A), runner.length(B)) == (4, None)


def test_a_fork_without_a_free_slot_is_a_capacity_error(runner):
    runner.run([work(session=A), work(session=B)])
    with pytest.raises(CapacityError, match=r"^KV cache: every session slot is taken"):
        runner.fork(A, C, 2)
    assert runner.length(C) is None


def test_what_a_session_holds_can_be_taken_ahead_and_is_never_cut(runner):
    runner.reserve(A, 3)
    assert runner.length(A) == 0
    one(runner, work())
    runner.reserve(A, 2)
    runner.reserve(B, 1)
    assert (runner.length(A), runner.length(B)) == (4, 0)
    with pytest.raises(CapacityError):
        runner.reserve(C, 1)


def test_a_full_context_is_a_capacity_error_that_changes_nothing(runner):
    one(runner, work(range(30), want=OutputKind.NOTHING))
    error = refusal(runner, work((1, 2, 3), pos0=30))
    assert isinstance(error, CapacityError)
    assert (error.needed, error.available) == (33, 32)
    assert runner.length(A) == 30
    one(runner, work((1, 2), pos0=30))


def test_an_overlong_reset_keeps_the_old_timeline(runner):
    one(runner, work())
    assert isinstance(refusal(runner, work(range(33), reset=True)), CapacityError)
    assert runner.length(A) == 4


def test_a_session_without_a_free_slot_is_a_capacity_error_until_one_is_dropped(runner):
    runner.run([work(session=A), work(session=B)])
    error = refusal(runner, work(session=C))
    assert isinstance(error, CapacityError)
    assert runner.length(C) is None
    runner.drop(A)
    runner.drop(A)
    assert runner.length(A) is None
    one(runner, work(session=C))


@pytest.mark.parametrize(("tokens", "bad"), [((5, 279), "279"), ((-1, 5), "-1")])
def test_a_token_outside_the_vocabulary_is_refused(runner, tokens, bad):
    assert str(refusal(runner, work(tokens))) == f"token id: got {bad}, expected 0 to 278"


def test_an_empty_span_is_refused(runner):
    assert "no tokens" in str(refusal(runner, work(())))


def states(rows: int, width: int = 64) -> HiddenBatch:
    return HiddenBatch.pack(np.full((rows, width), 0.1, np.float32), 32)


def test_hidden_states_of_another_width_or_number_are_refused(model):
    middle = stage(model, "1:2")
    wide = refusal(middle, work(hidden=states(4, 65), want=OutputKind.HIDDEN))
    assert "got 65 values a token, expected 64" in str(wide)
    few = refusal(middle, work(hidden=states(3), want=OutputKind.HIDDEN))
    assert "got 3 rows, expected 4" in str(few)
    assert middle.length(A) is None


def test_input_must_suit_the_slice(model, runner):
    middle = stage(model, "1:2")
    assert "expected hidden states" in str(refusal(middle, work(want=OutputKind.HIDDEN)))
    assert "expected tokens only" in str(refusal(runner, work(hidden=states(4))))


def test_logits_without_a_head_are_refused(model):
    first = stage(model, "0:1")
    assert not first.has_head
    assert "expected the output head" in str(refusal(first, work()))
    with pytest.raises(ModelError, match="output head"):
        first.apply_head(states(1))


@pytest.mark.parametrize("cuts", [("0:1", "2:output"), ("0:0", "1:1", "2:3"), ("0:2", "3-3")])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_any_cut_gives_the_bits_of_the_single_runner(tmp_path, cuts, precision):
    path = toy_llama(tmp_path / "m.gguf", quant="Q4_1")

    def opened(layers=None, want_head=False):
        config = EngineConfig(model=path, precision=precision, threads=1, n_slots=1)
        return open_runner(config, layers, want_head=want_head)

    whole = opened()
    stages = [opened(LayerSpec.parse(cut), want_head=i == 0) for i, cut in enumerate(cuts)]
    for span, pos0 in ((HELLO, 0), ((9,), 4), ((1, 2, 3, 4, 5), 5)):
        expected = one(whole, work(span, pos0=pos0)).logits
        hidden = None
        for runner in stages:
            output = one(runner, work(span, pos0=pos0, hidden=hidden, want=OutputKind.HIDDEN))
            hidden = output.hidden
        assert np.array_equal(stages[0].apply_head(hidden), expected)


def test_the_head_is_applied_to_the_last_row(model, runner):
    without = stage(model, "0:3", want_head=True)
    assert without.has_head
    assert not without.layers.has_output
    hidden = one(without, work(want=OutputKind.HIDDEN)).hidden
    assert np.array_equal(without.apply_head(hidden), one(runner, work()).logits)


@pytest.mark.parametrize("batch", [states(1, 63), HiddenBatch(0, 64, 32, memoryview(b""))])
def test_the_head_refuses_what_is_no_hidden_state(runner, batch):
    with pytest.raises(ModelError, match="hidden state"):
        runner.apply_head(batch)


def test_properties_tell_what_was_opened(model):
    runner = stage(model, "1:2", n_ctx=20)
    assert (runner.n_ctx, runner.n_slots, runner.can_rewind) == (20, 2, True)
    assert (runner.layers.start, runner.layers.end, runner.layers.has_output) == (1, 2, False)
    assert runner.weight_bytes > 0
    assert runner.device.type == "cpu"


def test_a_closed_runner_refuses_and_may_be_closed_again(model):
    runner = stage(model)
    one(runner, work())
    runner.close()
    runner.close()
    assert runner.length(A) is None
    assert "closed" in str(refusal(runner, work()))
