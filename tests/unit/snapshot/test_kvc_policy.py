"""When to save, what may be loaded, what goes first: server-and-cli.md#disk-cache, #eviction."""

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import ConfigError
from ds4py.snapshot.kvc import ABI_DS4, ABI_OWN, KvcHeader, Reason
from ds4py.snapshot.kvc_policy import (
    CacheIdentity,
    DiskCacheOptions,
    Entry,
    cold_anchor,
    continued_by,
    decayed_hits,
    eviction_order,
    file_name,
    is_protected,
    is_usable,
    longest,
    may_store_cold,
    names_of_prefixes,
    score,
    should_store_continued,
    with_slack,
)

NOW = 1_800_000_000.0
HOUR = 3600
OPTIONS = DiskCacheOptions()
FLASH = CacheIdentity(
    model_id=0, quant_bits=2, abi=ABI_DS4, n_ctx=32768, model="f" * 32, tokenizer="t" * 32
)
LLAMA = replace(FLASH, model_id=0x8000_0001, abi=ABI_OWN, quant_bits=4)


def entry(key: bytes = b"key", *, n_bytes: int = 1000, idle: float = 0, **fields) -> Entry:
    """A file of FLASH's."""
    header = KvcHeader(
        **{
            "n_tokens": 1000,
            "ctx": 32768,
            "payload_bytes": n_bytes,
            "key_bytes": len(key),
            "created": int(NOW),
            "last_used": int(NOW - idle),
            "reason": Reason.CONTINUED,
            "quant_bits": 2,
        }
        | fields
    )
    return Entry(file_name(key), 1, n_bytes, 0, header, FLASH.seal(5))


@pytest.mark.parametrize(
    ("hits", "hours", "left"),
    [(0, 0, 0), (4, 0, 4), (4, 6, 2), (4, 12, 1), (1, 3, 0.5**0.5), (1, 39, 2**-6.5), (1, 40, 0)],
)
def test_hits_are_halved_every_six_hours_and_few_are_none(hits, hours, left):
    assert decayed_hits(hits, hours * HOUR) == pytest.approx(left)


def test_a_clock_that_went_back_does_not_multiply_hits():
    assert decayed_hits(4, -6 * HOUR) == 4


@pytest.mark.parametrize(
    ("fields", "superseded", "value"),
    [
        ({}, False, 1.0),  # one token a byte, never hit
        ({"hits": 3}, False, 4.0),
        ({"hits": 3, "idle": 6 * HOUR}, False, 2.5),
        ({"n_bytes": 4000, "n_tokens": 2000}, False, 0.5),
        ({"reason": Reason.UNKNOWN}, False, 1.0),
        ({"reason": Reason.COLD}, False, 2.0),
        ({"reason": Reason.EVICT, "hits": 1}, False, 4.0),
        ({"reason": Reason.SHUTDOWN}, False, 2.0),
        ({}, True, 0.05),
        ({"hits": 1}, True, 2 * (0.05 + 0.45 / 2)),
        ({"hits": 9}, True, 10 * (0.05 + 0.45 * 0.9)),
        ({"reason": Reason.COLD}, True, 2.0),  # only continued files are superseded
    ],
)
def test_the_score_of_a_file(fields, superseded, value):
    assert score(entry(**fields), NOW, superseded=superseded) == pytest.approx(value)


def test_the_lowest_score_goes_first_and_of_equals_the_least_recently_used():
    files = {
        "poor": entry(b"poor", n_bytes=2000, idle=1),
        "old": entry(b"old", idle=60),
        "new": entry(b"new", idle=2),
        "kept": entry(b"kept", reason=Reason.EVICT, idle=999),
        "continued": entry(b"continued", hits=1, idle=0),
    }
    order = eviction_order(files.values(), NOW, frozenset({file_name(b"continued")}))
    names = {value.name: name for name, value in files.items()}
    assert [names[e.name] for e in order] == ["poor", "continued", "old", "new", "kept"]


def test_beginnings_that_many_share_go_last():
    shared = entry(b"system", n_bytes=100_000, hits=2, reason=Reason.COLD)
    rich = entry(b"chat", n_bytes=100, hits=5)
    assert score(shared, NOW) < score(rich, NOW)
    assert eviction_order([shared, rich], NOW, frozenset()) == [rich, shared]
    tired = entry(b"system", n_bytes=100_000, hits=2, reason=Reason.COLD, idle=HOUR)
    assert eviction_order([rich, tired], NOW, frozenset()) == [tired, rich]
    assert not is_protected(entry(hits=9, reason=Reason.EVICT), NOW)


def test_a_sealed_file_of_this_model_is_usable():
    assert is_usable(entry(), FLASH, OPTIONS)
    own = replace(entry(model_id=255, abi=ABI_OWN, quant_bits=4), seal=LLAMA.seal(1))
    assert is_usable(own, LLAMA, OPTIONS)


@pytest.mark.parametrize(
    "fields",
    [
        {"ctx": 32769},
        {"n_tokens": 511},
        {"n_tokens": 32768},
        {"model_id": 1},
        {"abi": ABI_OWN},
        {"n_bytes": (4096 << 20) + 1},
    ],
)
def test_what_no_session_could_take(fields):
    assert not is_usable(entry(**fields), FLASH, OPTIONS)


@pytest.mark.parametrize("field", ["model", "tokenizer", "model_id"])
def test_a_seal_of_another_model_or_tokenizer(field):
    other = {"model": "e" * 32, "tokenizer": "", "model_id": 1}[field]
    seal = replace(entry().seal, **{field: other})
    assert not is_usable(replace(entry(), seal=seal), FLASH, OPTIONS)


def test_ds4s_own_files_are_believed_where_payloads_are_exchanged():
    theirs = replace(entry(), seal=None)
    assert is_usable(theirs, FLASH, OPTIONS)
    own = replace(entry(model_id=255, abi=ABI_OWN), seal=None)
    assert not is_usable(own, LLAMA, OPTIONS)


def test_another_quantization_is_refused_only_if_the_user_says_so():
    theirs = replace(entry(quant_bits=4), seal=None)
    assert is_usable(theirs, FLASH, OPTIONS)
    assert not is_usable(theirs, FLASH, replace(OPTIONS, reject_different_quant=True))


texts = st.binary(max_size=12)


@given(texts, st.lists(st.integers(-2, 14)))
def test_names_of_prefixes_are_their_sha1(text, lengths):
    expected = {
        n: hashlib.sha1(text[:n]).hexdigest() + ".kv" for n in lengths if 0 < n <= len(text)
    }
    assert names_of_prefixes(text, lengths) == expected


keys = st.lists(
    st.binary(min_size=1, max_size=4).map(lambda b: bytes(x % 3 for x in b)), max_size=8
)


@given(keys, st.binary(max_size=6).map(lambda b: bytes(x % 3 for x in b)))
def test_the_longest_usable_prefix_is_found(stored, text):
    entries = {file_name(key): entry(key) for key in stored}
    found = longest(entries, text, FLASH, OPTIONS)
    fitting = [key for key in stored if text.startswith(key)]
    expected = max(fitting, key=len) if fitting else None
    assert (found and found.name) == (expected and file_name(expected))
    assert longest(entries, text, LLAMA, OPTIONS) is None


@given(keys, st.binary(max_size=6).map(lambda b: bytes(x % 3 for x in b)))
def test_what_a_new_text_continues(stored, key):
    expected = {file_name(old) for old in stored if key.startswith(old) and old != key}
    assert continued_by([entry(old) for old in stored], key) == expected


@pytest.mark.parametrize(
    ("size", "room"), [(0, 0), (1, 2), (100, 101), (101, 103), (10**9, 101 * 10**7)]
)
def test_slack_is_one_percent(size, room):
    assert with_slack(size) == room


@pytest.mark.parametrize(
    ("n_prompt", "n_cached", "may"),
    [(512, 0, True), (511, 0, False), (30000, 0, True), (30001, 0, False), (600, 1, False)],
)
def test_cold_saves(n_prompt, n_cached, may):
    assert may_store_cold(n_prompt, n_cached, OPTIONS) is may
    assert not may_store_cold(n_prompt, n_cached, replace(OPTIONS, cold_max_tokens=0))


USER, ANSWER = (7,), (8, 9)


def prompt(*turns: tuple[int, ...]) -> list[int]:
    return [token for turn in turns for token in turn]


@pytest.mark.parametrize(
    ("tokens", "anchor", "why"),
    [
        (prompt((1,) * 600, USER, (2,) * 30, ANSWER), 600, "in front of the question"),
        (prompt((1,) * 600, USER, (2,) * 5, USER, (2,) * 5, ANSWER), 606, "of two the last"),
        (prompt((1,) * 600, USER, ANSWER, (3,) * 9, USER, ANSWER), 600, "but before an answer"),
        (prompt((1,) * 511, USER, (2,) * 2000, ANSWER), 2048, "too early: aligned"),
        (prompt((1,) * 9, USER, (2,) * 2067, ANSWER), 2079, "2079 - 32 is less than 2048: all"),
        (prompt((1,) * 9, USER, (2,) * 2068, ANSWER), 2048, "2080 - 32 is as much"),
        (prompt((1,) * 9, USER, (2,) * 600, ANSWER), 612, "nothing aligned: all"),
        (prompt((1,) * 700), 700, "no turns at all"),
        (prompt((1,) * 700, USER, (2,) * 9), 700, "no answer begins"),
        (prompt((1,) * 700, (8, 7, 9)), 701, "half a marker is none"),
    ],
)
def test_where_a_cold_save_is_cut(tokens, anchor, why):
    assert cold_anchor(tokens, USER, ANSWER, OPTIONS) == anchor, why


def test_formats_without_markers_are_aligned():
    assert cold_anchor([1] * 5000, (), (), OPTIONS) == 4096


@pytest.mark.parametrize(
    ("n_tokens", "n_stored", "due"),
    [
        (10240, 0, True),
        (10000, 0, False),
        (20480, 10240, True),
        (10240, 10240, False),
        (0, 0, False),
    ],
)
def test_continued_saves_stand_at_multiples_of_the_rounded_interval(n_tokens, n_stored, due):
    assert OPTIONS.continued_step == 10240
    assert should_store_continued(n_tokens, n_stored, OPTIONS) is due


def test_continued_saves_can_be_off_and_have_a_minimum():
    assert not should_store_continued(10240, 0, replace(OPTIONS, continued_interval_tokens=0))
    short = replace(OPTIONS, continued_interval_tokens=256, boundary_align_tokens=256)
    assert [n for n in range(0, 1100, 4) if should_store_continued(n, 0, short)] == [512, 768, 1024]


@pytest.mark.parametrize(
    "bad",
    [
        {"space_bytes": 0},
        {"min_tokens": 0},
        {"cold_max_tokens": -1},
        {"cold_max_tokens": 1},
        {"cold_max_tokens": 511},
        {"continued_interval_tokens": -1},
        {"boundary_trim_tokens": -1},
        {"boundary_align_tokens": 0},
    ],
)
def test_options_that_are_refused(bad):
    with pytest.raises(ConfigError, match=r"disk cache .*expected at least"):
        DiskCacheOptions(**bad)


def test_options_at_their_limits():
    DiskCacheOptions(
        cold_max_tokens=0, continued_interval_tokens=0, boundary_trim_tokens=0, min_tokens=1
    )
    DiskCacheOptions(cold_max_tokens=512, boundary_align_tokens=1, space_bytes=1)


def test_fingerprints_have_their_room():
    with pytest.raises(ConfigError, match="at most 32 ASCII"):
        replace(FLASH, tokenizer="t" * 33)
