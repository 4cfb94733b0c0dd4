"""Sessions on disk around a request: found, loaded, saved at the right moments."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import RemoteWorkError
from ds4py.server.history.disk_prefix_cache import DiskPrefixCache
from ds4py.server.history.exact_tokens import ExactTokens
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.snapshot.disk_cache import CacheIdentity, DiskCache, DiskCacheOptions
from ds4py.snapshot.kvc import ABI_OWN, Reason
from tests.support.fakes import FakeSession
from tests.unit.server.support import N_VOCAB, script, text_stack

IDENTITY = CacheIdentity(
    model_id=0x80000001, quant_bits=4, abi=ABI_OWN, n_ctx=1000, model="m", tokenizer="t"
)
SYSTEM = tuple(script("You are a careful assistant. ", end=False))
FIRST = (*SYSTEM, *script("What is a whale?", end=False))
OTHER = tuple(script("Something else entirely, quite different.", end=False))


def new_session():
    return FakeSession(n_vocab=N_VOCAB, n_ctx=1000)


@pytest.fixture
def make(tmp_path):
    """Checkpoints over one folder, as by one server after another."""

    def build(**options):
        usual = {"min_tokens": 8, "continued_interval_tokens": 0, "boundary_align_tokens": 1}
        limits = DiskCacheOptions(**{**usual, "boundary_trim_tokens": 0, **options})
        tools, exact_tokens = ToolCallMemory(), ExactTokens()
        disk = DiskCache(tmp_path / "kv", limits, IDENTITY)
        built = DiskPrefixCache(disk, text_stack().tokenizer, tools, exact_tokens)
        built.tools, built.transcripts = tools, exact_tokens
        return built

    return build


def prefill(checkpoints, session, prompt, head=None):
    return checkpoints.prefill(
        session, prompt, head, progress=lambda *_: None, cancelled=lambda: False
    )


def files(tmp_path):
    return sorted((tmp_path / "kv").glob("*.kv"))


def test_an_evicted_conversation_comes_back(make, tmp_path):
    checkpoints, session = make(), new_session()
    session.sync(FIRST)
    assert checkpoints.resume(session, OTHER) == OTHER
    assert len(files(tmp_path)) == 1
    session.sync(OTHER)
    longer = (*FIRST, *OTHER[:5])
    assert checkpoints.resume(session, longer) == longer
    assert tuple(session.tokens) == FIRST, "loaded, not evaluated"
    assert len(files(tmp_path)) == 2, "what the session lost was saved before"


def test_a_conversation_survives_the_server(make):
    session = new_session()
    session.sync(FIRST)
    make().save(session, Reason.SHUTDOWN)
    fresh = new_session()
    longer = (*FIRST, *OTHER[:5])
    assert make().resume(fresh, longer) == longer
    assert tuple(fresh.tokens) == FIRST


def test_what_memory_holds_is_not_read_from_disk(make):
    checkpoints, session = make(), new_session()
    session.sync(FIRST)
    checkpoints.save(session, Reason.EVICT)
    session.load = None  # calling it would fail
    assert checkpoints.resume(session, (*FIRST, 30)) == (*FIRST, 30)


def test_hidden_reasoning_comes_back_with_the_visible_text(make):
    checkpoints, session = make(), new_session()
    hidden = (*FIRST, *script("secret thought", end=False), *script("It swims.", end=False))
    seen = (*FIRST, *script("It swims.", end=False))
    session.sync(hidden)
    checkpoints.transcripts.keep(hidden, [lambda: seen])
    checkpoints.save(session, Reason.EVICT)
    fresh = new_session()
    assert make().resume(fresh, (*seen, 30, 31)) == (*hidden, 30, 31)
    assert tuple(fresh.tokens) == hidden


def test_the_last_token_of_calls_is_evaluated_before_saving(make):
    checkpoints, session = make(), new_session()
    said = (*FIRST, *script("call", end=False))
    session.sync(said[:-1])
    checkpoints.transcripts.keep(said, [lambda: said])
    checkpoints.save(session, Reason.EVICT)
    fresh = new_session()
    make().resume(fresh, (*said, 30))
    assert tuple(fresh.tokens) == said


def test_a_cold_prompt_is_saved_at_its_first_question(make, tmp_path):
    checkpoints, session = make(), new_session()
    prompt = (*SYSTEM, *OTHER)
    n_cached = prefill(checkpoints, session, prompt, lambda: len(SYSTEM))
    assert (n_cached, tuple(session.tokens)) == (0, SYSTEM)
    assert len(files(tmp_path)) == 1
    fresh = new_session()
    make().resume(fresh, FIRST)
    assert tuple(fresh.tokens) == SYSTEM, "another question after the same system text"


def test_nothing_is_saved_on_the_way_of_a_prompt_that_is_known(make, tmp_path):
    checkpoints, session = make(), new_session()
    session.sync(SYSTEM)
    assert prefill(checkpoints, session, (*SYSTEM, *OTHER), lambda: len(SYSTEM)) is None
    assert files(tmp_path) == []


def test_long_prompts_and_answers_are_saved_at_intervals(make, tmp_path):
    checkpoints, session = make(cold_max_tokens=0, continued_interval_tokens=10), new_session()
    prompt = FIRST[:35]
    prefill(checkpoints, session, prompt)
    assert (len(session.tokens), len(files(tmp_path))) == (30, 3)
    session.sync(prompt)
    for token in OTHER[:7]:
        checkpoints.grown(session)
        session.eval(token)
    assert len(files(tmp_path)) == 4


def test_calls_come_back_in_the_words_of_the_model(make):
    checkpoints, session = make(), new_session()
    block = "\n<tool_calls>x</tool_calls>"
    said = (*FIRST, *script(block, end=False))
    session.sync(said)
    checkpoints.tools.remember(["call_1"], block)
    checkpoints.save(session, Reason.EVICT)
    later = make()
    later.recall_calls(["call_1", "call_2"])
    assert later.tools.block_for(["call_1"]) == block
    assert later.tools.block_for(["call_2"]) is None


def test_a_file_that_no_session_can_load_costs_a_warning_and_is_not_tried_again(make, caplog):
    checkpoints, session = make(), new_session()
    session.sync(FIRST)
    checkpoints.save(session, Reason.EVICT)
    fresh, n_tried = new_session(), 0

    def refuse(_):
        nonlocal n_tried
        n_tried += 1
        raise RemoteWorkError("other cache type", hop="worker1")

    fresh.load = refuse
    prompt = (*FIRST, 30)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resume(fresh, prompt) == prompt
        assert checkpoints.resume(fresh, prompt) == prompt
    assert (n_tried, len(caplog.records)) == (1, 1)
    assert make().resume(new_session(), prompt) == prompt
    assert "other cache type" in caplog.text


def test_a_session_that_can_not_be_saved_costs_a_warning(make, caplog, tmp_path):
    checkpoints, session = make(), new_session()
    session.sync(FIRST)

    def refuse():
        raise RemoteWorkError("no", hop="worker1")

    session.save = refuse
    with caplog.at_level(logging.WARNING):
        checkpoints.save(session, Reason.EVICT)
    assert "was not saved" in caplog.text
    assert files(tmp_path) == []


@given(st.lists(st.sampled_from(sorted(set(FIRST))), min_size=2, max_size=12), st.data())
def test_a_prompt_goes_on_behind_any_of_its_bytes(words, data):
    """Whatever the cut, the rest spells the rest, and tokens that it does not touch stay."""
    tokenizer = text_stack().tokenizer
    prompt = tokenizer.encode("héllo " + "".join(map(str, words)) + " the end", special=False)
    spelled = tokenizer.decode(prompt, special=True)
    cut = data.draw(st.integers(1, len(spelled) - 1))
    disk_prefixes = DiskPrefixCache(None, tokenizer, ToolCallMemory(), ExactTokens())
    rest = disk_prefixes._rest(prompt, cut)
    if rest is not None:
        assert tokenizer.decode(rest, special=True) == spelled[cut:]
        assert rest[-1] == prompt[-1] or len(spelled) - cut < 8
    else:
        whole = [n for n in range(len(prompt)) if len(tokenizer.decode(prompt[:n])) >= cut]
        assert not whole or any(byte > 127 for byte in spelled)
