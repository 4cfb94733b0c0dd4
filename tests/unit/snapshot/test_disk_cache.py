"""The disk cache: what is stored is found and loaded, the budget holds, bad files cost a miss."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import ConfigError
from ds4py.snapshot import disk_cache, kvc_files, read_dsv4, write_dsv4
from ds4py.snapshot.disk_cache import CacheIdentity, Checkpoint, DiskCache, DiskCacheOptions
from ds4py.snapshot.kvc import ABI_DS4, ABI_OWN, HEADER_BYTES, SEAL_BYTES, Flag, KvcHeader, Reason
from ds4py.snapshot.kvc_policy import file_name, with_slack
from tests.unit.snapshot.test_ds4_format import CTX, SIZES, whole

SYSTEM, CHAT, LONGER = b"system", b"system question", b"system question answer"
OPTIONS = DiskCacheOptions(min_tokens=8, cold_max_tokens=100, space_bytes=100_000)
IDENTITY = CacheIdentity(
    model_id=0, quant_bits=2, abi=ABI_DS4, n_ctx=4096, model="f" * 32, tokenizer="t" * 32
)
OWN = replace(IDENTITY, model_id=0x8000_0001, abi=ABI_OWN)
OVERHEAD = HEADER_BYTES + SEAL_BYTES
TOOLS = {b"call_1": b"<one>", b"call_2": b"<two>"}


class Clock:
    """A time that tests move."""

    def __init__(self) -> None:
        self.time = 1_800_000_000.0

    def __call__(self) -> float:
        return self.time


def pieces(payload: bytes) -> list[memoryview]:
    return [memoryview(payload)[at : at + 7] for at in range(0, len(payload), 7)]


def save(cache: DiskCache, key: bytes, payload: bytes = b"payload", **fields) -> bool:
    fields = {"n_tokens": 64, "reason": Reason.CONTINUED} | fields
    return cache.store(Checkpoint(key=key, **fields), lambda: pieces(payload))


def load(cache: DiskCache, prompt: bytes) -> bytes | None:
    """Look until something is loaded or nothing is left, as a server does."""
    while (hit := cache.find(prompt)) is not None:
        if (loaded := cache.load(hit)) is not None:
            return bytes(loaded.payload)
    return None


def files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".kv.lock")


def size(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in os.listdir(folder))


def header(folder: Path, key: bytes) -> KvcHeader:
    return KvcHeader.decode((folder / file_name(key)).read_bytes())


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def cache(folder, clock):
    return DiskCache(folder, OPTIONS, IDENTITY, now=clock)


def reopen(folder: Path, **changes) -> DiskCache:
    return DiskCache(folder, OPTIONS, replace(IDENTITY, **changes))


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# what is stored is found


def test_the_longest_text_wins(cache):
    assert cache.find(LONGER) is None
    for key in (CHAT, SYSTEM, b"another"):
        assert save(cache, key, payload=b"of " + key)
    assert load(cache, LONGER) == b"of " + CHAT
    assert load(cache, CHAT) == b"of " + CHAT
    assert load(cache, CHAT[:-1]) == b"of " + SYSTEM
    assert load(cache, b"sys") is None


def test_the_file_is_ds4s(cache, folder, clock):
    save(cache, CHAT, b"x" * 20, n_tokens=9, reason=Reason.EVICT, flags=Flag.THINKING_VISIBLE)
    (name,) = files(folder)
    raw = (folder / name).read_bytes()
    assert name == file_name(CHAT)
    assert KvcHeader.decode(raw) == KvcHeader(
        n_tokens=9,
        ctx=4096,
        payload_bytes=20,
        key_bytes=len(CHAT),
        created=int(clock()),
        last_used=int(clock()),
        reason=Reason.EVICT,
        flags=Flag.THINKING_VISIBLE,
        quant_bits=2,
    )
    assert raw[HEADER_BYTES:-SEAL_BYTES] == CHAT + b"x" * 20


def test_files_and_folder_are_the_owners(cache, folder):
    save(cache, CHAT)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in os.listdir(folder):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_a_new_server_finds_what_the_last_one_stored(cache, folder):
    save(cache, CHAT, b"payload of a chat")
    assert load(reopen(folder), LONGER) == b"payload of a chat"


def test_payloads_of_other_architectures(folder):
    cache = DiskCache(folder, OPTIONS, OWN)
    save(cache, CHAT)
    assert (header(folder, CHAT).abi, header(folder, CHAT).model_id) == (64, 255)
    assert load(cache, CHAT) == b"payload"
    assert load(reopen(folder), CHAT) is None


@pytest.mark.parametrize(
    "other",
    [
        {"model_id": 1},
        {"model": ""},
        {"tokenizer": "u" * 32},
        {"n_ctx": 4095},
        {"abi": ABI_OWN},
    ],
)
def test_other_models_and_smaller_contexts_load_nothing(cache, folder, other, caplog):
    save(cache, CHAT)
    assert load(reopen(folder, **other), CHAT) is None
    assert load(cache, CHAT) == b"payload"
    assert not warnings(caplog)


def test_a_hit_is_counted_in_place(cache, folder, clock):
    save(cache, CHAT)
    clock.time += 100
    loaded = cache.load(cache.find(CHAT))
    assert loaded.header.hits == 0
    assert header(folder, CHAT).hits == 1
    assert header(folder, CHAT).last_used - header(folder, CHAT).created == 100
    assert load(cache, CHAT) == b"payload"
    assert header(folder, CHAT).hits == 2


def test_nothing_short_and_nothing_without_text_is_stored(cache, folder):
    assert not save(cache, CHAT, n_tokens=7)
    assert not save(cache, b"")
    assert files(folder) == []


def test_files_of_other_processes_are_seen_at_once(cache, folder):
    other = reopen(folder)
    save(other, CHAT, b"theirs")
    assert load(cache, CHAT) == b"theirs"
    hit = cache.find(CHAT)
    (folder / file_name(CHAT)).unlink()
    assert cache.load(hit) is None
    assert cache.find(CHAT) is None


def test_a_file_that_was_replaced_is_not_taken_for_the_one_that_was_found(cache, folder, tmp_path):
    path = ds4s(folder, CHAT, b"before")
    hit = cache.find(CHAT)
    path.rename(tmp_path / "old")  # keeps its number in use
    ds4s(folder, CHAT, b"behind")
    assert cache.load(hit) is None
    assert load(cache, CHAT) == b"behind"


def test_a_file_that_another_model_overwrote_is_not_loaded(cache, folder, tmp_path):
    save(cache, CHAT, b"ours..")
    hit = cache.find(CHAT)
    other = tmp_path / "other"
    save(DiskCache(other, OPTIONS, replace(IDENTITY, model="g" * 32)), CHAT, b"theirs")
    path = folder / file_name(CHAT)
    path.write_bytes((other / path.name).read_bytes())
    assert cache.load(hit) is None
    assert cache.find(CHAT) is None
    assert files(folder) == [path.name]


def test_only_headers_of_new_files_are_read(cache, monkeypatch):
    save(cache, CHAT)
    assert cache.find(CHAT) is not None
    opened = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a: opened.append(self.name) or real(self, *a))
    assert cache.find(CHAT) is not None
    assert opened == []


def test_a_sessions_payload_is_read_as_it_was_written(cache):
    session = whole()
    checkpoint = Checkpoint(key=b"odd", n_tokens=19, reason=Reason.COLD)
    assert cache.store(checkpoint, lambda: write_dsv4(session))
    read = read_dsv4(cache.load(cache.find(b"odd")).payload, SIZES, n_ctx=CTX)
    assert b"".join(write_dsv4(read)) == b"".join(write_dsv4(session))
    assert read.tokens.flags.aligned


# the same text again


def test_a_known_text_keeps_its_payload_and_learns_calls(cache, folder):
    save(cache, CHAT, b"first")
    created = header(folder, CHAT)
    save(cache, CHAT, b"second", tool_map={b"call_1": b"<one>"}, reason=Reason.SHUTDOWN)
    assert header(folder, CHAT) == replace(created, flags=Flag.TOOL_MAP)
    save(cache, CHAT, tool_map={b"call_2": b"<two>"})
    loaded = cache.load(cache.find(CHAT))
    assert (bytes(loaded.payload), loaded.tool_map) == (b"first", TOOLS)


def test_a_known_text_costs_no_payload_and_no_write(cache, folder):
    save(cache, CHAT, tool_map=TOOLS)
    before = (folder / file_name(CHAT)).stat()

    def never() -> list[memoryview]:
        raise AssertionError

    again = Checkpoint(key=CHAT, n_tokens=64, reason=Reason.EVICT, tool_map={b"call_1": b"<one>"})
    assert cache.store(again, never)
    after = (folder / file_name(CHAT)).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_file_of_another_model_is_replaced(cache, folder):
    save(cache, CHAT, b"ours")
    other = reopen(folder, model="e" * 32)
    assert save(other, CHAT, b"theirs")
    assert load(cache, CHAT) is None
    assert load(other, CHAT) == b"theirs"


def test_what_the_session_raises_passes_through(cache, folder):
    def broken() -> list[memoryview]:
        raise ConnectionError("a stage is gone")

    with pytest.raises(ConnectionError):
        cache.store(Checkpoint(key=CHAT, n_tokens=64, reason=Reason.COLD), broken)
    assert files(folder) == []


def test_more_calls_than_a_file_may_hold_leave_it_as_it_is(cache, folder, caplog):
    save(cache, CHAT, tool_map=TOOLS)
    assert not save(cache, CHAT, tool_map={b"i" * 257: b"too long an id"})
    assert "bytes of an id 257" in warnings(caplog)[0]
    assert cache.load(cache.find(CHAT)).tool_map == TOOLS


# calls of earlier servers


def test_blocks_of_calls_are_found_without_a_prompt(cache, folder):
    save(cache, CHAT, tool_map=TOOLS)
    save(cache, SYSTEM)
    later = reopen(folder)
    assert later.tool_blocks([b"call_2", b"call_9"]) == {b"call_2": b"<two>"}
    assert reopen(folder, model="e" * 32).tool_blocks([b"call_2"]) == {}


def test_ids_of_a_file_are_read_once(cache, folder, monkeypatch):
    save(cache, CHAT, tool_map=TOOLS)
    reads = []
    real = disk_cache.read_tool_map
    monkeypatch.setattr(disk_cache, "read_tool_map", lambda *a: reads.append(a) or real(*a))
    for _ in range(3):
        assert cache.tool_blocks([b"unknown"]) == {}
    assert len(reads) == 1
    assert cache.tool_blocks(TOOLS) == TOOLS


# consumed files


def test_a_long_file_is_kept_until_its_text_is_continued(cache, folder):
    save(cache, CHAT, n_tokens=101)
    assert load(cache, CHAT) == b"payload"
    save(cache, b"something else", n_tokens=200)
    assert load(reopen(folder), CHAT) == b"payload"
    save(cache, LONGER, n_tokens=120)
    assert files(folder) == sorted(map(file_name, [LONGER, b"something else"]))


@pytest.mark.parametrize(("n_tokens", "loaded"), [(100, True), (101, False)])
def test_short_files_and_files_that_nobody_loaded_stay(cache, folder, n_tokens, loaded):
    save(cache, CHAT, n_tokens=n_tokens)
    if loaded:
        load(cache, CHAT)
    save(cache, LONGER, n_tokens=120)
    assert file_name(CHAT) in files(folder)


# the budget


def test_the_lowest_score_goes_first(cache, folder, clock):
    for n, key in enumerate((b"a", b"b", b"c")):
        clock.time += 1
        save(cache, key, bytes(30_000), n_tokens=64 if n else 63)
    save(cache, b"d", bytes(30_000), n_tokens=64)
    assert files(folder) == sorted(map(file_name, [b"b", b"c", b"d"]))
    save(cache, b"e", bytes(30_000), n_tokens=64, reason=Reason.EVICT)  # equals: b is older
    assert files(folder) == sorted(map(file_name, [b"c", b"d", b"e"]))
    save(cache, b"d more", bytes(30_000), n_tokens=64)  # holds all of d's text
    assert files(folder) == sorted(map(file_name, [b"c", b"e", b"d more"]))


def test_a_file_must_fit_with_its_slack(folder, caplog):
    key, payload = b"k", bytes(1000)
    need = with_slack(1000 + 1 + OVERHEAD)
    tight = DiskCache(folder, replace(OPTIONS, space_bytes=need - 1), IDENTITY)
    assert not save(tight, key, payload)
    assert "do not fit the budget" in warnings(caplog)[0]
    assert save(DiskCache(folder, replace(OPTIONS, space_bytes=need), IDENTITY), key, payload)


def test_a_file_that_could_never_fit_removes_nothing(cache, folder):
    save(cache, CHAT)
    assert not save(cache, b"large", bytes(100_000))
    assert load(cache, CHAT) == b"payload"


def test_the_budget_holds_from_the_start(cache, folder):
    for key in (b"a", b"b", b"c"):
        save(cache, key, bytes(30_000))
    DiskCache(folder, replace(OPTIONS, space_bytes=70_000), IDENTITY)
    assert len(files(folder)) == 2


def test_replacing_a_file_needs_room_for_the_difference_only(cache, folder):
    save(cache, b"a", bytes(49_000))
    save(cache, b"b", bytes(49_000))
    assert save(reopen(folder, model="e" * 32), b"b", bytes(49_100))
    assert len(files(folder)) == 2


actions = st.lists(
    st.tuples(
        st.sampled_from("sslor"),
        st.text("ab", min_size=1, max_size=4).map(str.encode),
        st.integers(0, 6000),
        st.integers(8, 300),
        st.sampled_from(list(Reason)[:5]),
    ),
    max_size=25,
)


@given(actions)
def test_the_folder_is_never_larger_than_the_budget_after_a_save(steps):
    options, clock = replace(OPTIONS, space_bytes=15_000), Clock()
    with tempfile.TemporaryDirectory() as name:
        folder, stored = Path(name), {}
        caches = [
            DiskCache(folder, options, identity, now=clock)
            for identity in (IDENTITY, replace(IDENTITY, model="e" * 32))
        ]
        for what, key, n_bytes, n_tokens, reason in steps:
            clock.time += 60
            cache = caches[what == "o"]
            if what == "l":
                got = load(cache, key)
                assert got is None or got in stored.values()
            else:
                payload = bytes([n_tokens % 256]) * n_bytes
                tools = {key: payload[:100]} if what == "r" else {}
                save(cache, key, payload, n_tokens=n_tokens, reason=reason, tool_map=tools)
                stored[key, what, len(stored)] = payload
                assert size(folder) <= options.space_bytes
        assert not [name for name in files(folder) if not name.endswith(".kv")]


# what is not ours


@pytest.mark.parametrize(
    "change",
    [
        {"reason": Reason.SAVED_CHAT},
        {"reason": Reason.SYSTEM_PREFIX},
        {"flags": Flag.TITLE},
        {"abi": 3},
    ],
)
def test_what_somebody_else_saved_is_left_alone(cache, folder, change, caplog):
    save(cache, CHAT)
    path = folder / file_name(CHAT)
    raw = replace(header(folder, CHAT), **change).encode() + path.read_bytes()[HEADER_BYTES:]
    path.write_bytes(raw)
    assert load(cache, CHAT) is None
    assert not save(cache, CHAT, b"replaces?")
    assert not save(cache, b"large", bytes(99_000 - OVERHEAD))
    assert path.read_bytes() == raw
    assert "do not fit the budget" in "".join(warnings(caplog))


def test_files_of_other_kinds_are_no_part_of_it(cache, folder):
    (folder / "notes.txt").write_bytes(bytes(200_000))
    (folder / file_name(SYSTEM)).mkdir()
    os.mkfifo(folder / file_name(CHAT))
    assert cache.find(LONGER) is None
    assert save(cache, LONGER)
    assert load(cache, LONGER) == b"payload"


def ds4s(folder: Path, key: bytes, payload: bytes, *, tools: bytes = b"", **fields) -> Path:
    """Write a file as ds4 does."""
    head = KvcHeader(
        n_tokens=64,
        ctx=4096,
        payload_bytes=len(payload),
        key_bytes=len(key),
        created=1,
        last_used=1,
        flags=Flag.TOOL_MAP if tools else Flag.NONE,
        **fields,
    )
    path = folder / file_name(key)
    path.write_bytes(head.encode() + key + payload + tools)
    return path


def test_ds4s_own_files_are_loaded(cache, folder):
    ds4s(folder, SYSTEM, b"plain")
    assert load(cache, CHAT) == b"plain"
    ds4s(folder, CHAT, b"tools", tools=b"KTM\1\1\0\0\0" + b"\1\0\0\0\2\0\0\0" + b"i" + b"bl")
    loaded = cache.load(cache.find(CHAT))
    assert (bytes(loaded.payload), loaded.tool_map) == (b"tools", {b"i": b"bl"})
    assert load(DiskCache(folder, OPTIONS, OWN), CHAT) is None


def test_ds4s_own_files_learn_calls_as_ds4_would_write_them(cache, folder):
    path = ds4s(folder, CHAT, b"theirs")
    assert save(cache, CHAT, tool_map={b"i": b"bl"})
    tail = b"theirs" + b"KTM\1\1\0\0\0" + b"\1\0\0\0\2\0\0\0" + b"i" + b"bl"
    assert path.read_bytes().endswith(tail)


def test_a_text_that_is_not_what_the_name_says_is_noticed_without_a_checksum(cache, folder, caplog):
    path = ds4s(folder, CHAT, b"theirs")
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES] ^= 1
    path.write_bytes(raw)
    assert load(cache, CHAT) is None
    assert "its key text is not what its name stands for" in warnings(caplog)[0]


def test_a_quantization_can_be_refused(cache, folder):
    ds4s(folder, CHAT, b"theirs", quant_bits=4)
    assert load(cache, CHAT) == b"theirs"
    strict = DiskCache(folder, replace(OPTIONS, reject_different_quant=True), IDENTITY)
    assert load(strict, CHAT) is None


# damage


def test_a_damaged_file_is_set_aside_once_and_the_next_best_is_loaded(cache, folder, caplog):
    save(cache, SYSTEM, b"of the system")
    save(cache, CHAT, b"of the chat")
    path = folder / file_name(CHAT)
    damaged = bytearray(path.read_bytes())
    damaged[-SEAL_BYTES - 1] ^= 1
    path.write_bytes(damaged)
    for _ in range(3):
        assert load(cache, LONGER) == b"of the system"
    aside = folder / f"{path.name}.damaged-1"
    assert aside.read_bytes() == damaged
    (warning,) = warnings(caplog)
    assert "checksum" in warning
    assert warning.endswith(f"set aside as {aside.name}")


@pytest.mark.parametrize("identity", [IDENTITY, OWN])
@pytest.mark.parametrize("cut", [1, SEAL_BYTES + 1])
def test_a_cut_file_is_set_aside_before_anybody_asks_for_it(folder, identity, cut, caplog):
    cache = DiskCache(folder, OPTIONS, identity)
    save(cache, CHAT)
    path = folder / file_name(CHAT)
    os.truncate(path, path.stat().st_size - cut)
    assert load(cache, CHAT) is None
    assert load(cache, b"something else") is None
    assert files(folder) == [f"{path.name}.damaged-1"]
    assert len(warnings(caplog)) == 1


def test_a_file_that_no_session_takes_is_set_aside(cache, folder, caplog):
    save(cache, CHAT)
    cache.reject(hit := cache.find(CHAT), "payload of another model")
    cache.reject(hit, "again")
    assert cache.find(CHAT) is None
    assert files(folder) == [f"{file_name(CHAT)}.damaged-1"]
    (warning,) = warnings(caplog)
    assert "payload of another model" in warning


def test_a_second_damaged_file_does_not_replace_the_first(cache, folder):
    for _ in range(2):
        save(cache, CHAT)
        cache.reject(cache.find(CHAT), "bad")
    assert files(folder) == [f"{file_name(CHAT)}.damaged-{n}" for n in (1, 2)]


def test_a_new_file_is_not_set_aside_for_an_old_one(cache, folder):
    save(cache, CHAT)
    hit = cache.find(CHAT)
    os.replace(folder / file_name(CHAT), folder / "old")
    save(cache, CHAT, b"new")
    cache.reject(hit, "the old one was bad")
    assert load(cache, CHAT) == b"new"


def test_what_can_not_be_set_aside_is_not_tried_again(cache, monkeypatch, caplog):
    save(cache, CHAT)

    def denied(path: Path) -> Path:
        raise PermissionError(errno.EACCES, "read-only")

    monkeypatch.setattr(disk_cache, "set_aside", denied)
    cache.reject(cache.find(CHAT), "bad")
    for _ in range(2):
        assert cache.find(CHAT) is None
    (warning,) = warnings(caplog)
    assert "could not be set aside" in warning


def test_damaged_files_are_the_first_to_make_room(cache, folder):
    save(cache, CHAT, bytes(40_000))
    cache.reject(cache.find(CHAT), "bad")
    save(cache, SYSTEM, bytes(40_000))
    save(cache, b"new", bytes(40_000))
    assert files(folder) == sorted(map(file_name, [SYSTEM, b"new"]))


@given(st.data())
def test_whatever_happens_to_a_file_its_content_is_right_or_not_loaded(data):
    abi = data.draw(st.sampled_from([IDENTITY, OWN]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = DiskCache(folder, OPTIONS, abi)
        save(cache, CHAT, b"payload of a chat", tool_map=data.draw(st.sampled_from([{}, TOOLS])))
        path = folder / file_name(CHAT)
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(raw)))
            match data.draw(st.sampled_from(["flip", "cut", "grow", "set", "huge"])):
                case "flip" if at < len(raw):
                    raw[at] ^= 1 << data.draw(st.integers(0, 7))
                case "cut":
                    del raw[at:]
                case "grow":
                    raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
                case "set" if at < len(raw):
                    raw[at] = data.draw(st.sampled_from([0, 1, 2, 64, 255]))
                case "huge":
                    raw[at : at + 8] = b"\xff" * len(raw[at : at + 8])
        path.write_bytes(raw)
        hit = cache.find(LONGER)
        loaded = hit and cache.load(hit)
        assert loaded is None or bytes(loaded.payload) == b"payload of a chat"
        assert loaded is None or hit.key == CHAT
        assert not loaded or not loaded.tool_map or loaded.tool_map == TOOLS
        assert load(cache, LONGER) in {None, b"payload of a chat"}
        assert save(cache, LONGER)


def test_random_bytes_under_a_good_name(cache, folder):
    for n, raw in enumerate([b"", b"KVC", b"KVC\1" * 30, b"\xff" * 200]):
        (folder / file_name(CHAT[: n + 1])).write_bytes(raw)
    assert load(cache, CHAT) is None


def test_a_sparse_giant_takes_no_memory(cache, folder):
    path = ds4s(folder, CHAT, b"")
    giant = replace(header(folder, CHAT), payload_bytes=1 << 40).encode() + CHAT
    path.write_bytes(giant)
    os.truncate(path, len(giant) + (1 << 40))
    assert load(cache, CHAT) is None


# trouble with the disk


CHILD = """
import os, sys
from pathlib import Path
from tests.unit.snapshot.test_disk_cache import *
folder = Path(sys.argv[1])
"""


def child(folder: Path, body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + body, str(folder)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert not err, err
    return out


def test_a_full_disk_is_a_warning_and_a_miss(cache, folder):
    """A limit on file sizes stands in for it: writing fails in the same place."""
    script = """
import resource
logging.basicConfig(stream=sys.stdout, level="WARNING", format="%(message)s")
cache = DiskCache(folder, OPTIONS, IDENTITY)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
print(save(cache, b"large", bytes(9000)), save(cache, b"large", bytes(9000)))
print(save(cache, SYSTEM), load(cache, CHAT))
"""
    lines = finish(child(folder, script)).splitlines()
    assert lines[0].endswith("File too large; going on without")
    assert lines[1:] == ["False False", "True b'payload'"]
    assert files(folder) == [file_name(SYSTEM)]


def test_a_writer_that_dies_leaves_nothing_for_the_next_start(cache, folder):
    script = """
cache = DiskCache(folder, OPTIONS, IDENTITY)
kvc_files.os.fsync = lambda descriptor: os.kill(os.getpid(), 9)
save(cache, CHAT)
"""
    process = child(folder, script)
    process.communicate(timeout=120)
    assert process.returncode == -9
    (left,) = files(folder)
    assert left.startswith(f".{file_name(CHAT)}.{process.pid}-")
    assert cache.find(CHAT) is None
    reopen(folder)
    assert files(folder) == []


def test_a_file_in_the_making_is_not_taken_for_a_leftover(cache, folder):
    with kvc_files.locked(folder):
        part = kvc_files.PartFile(folder / file_name(CHAT), 500)
    with part:
        reopen(folder)
        assert len(files(folder)) == 1
        assert not save(cache, b"large", bytes(98_800))  # its room is taken
    assert files(folder) == []
    assert save(cache, b"large", bytes(98_800))


def test_two_processes_share_a_folder_and_its_budget(cache, folder):
    script = """
cache = DiskCache(folder, OPTIONS, IDENTITY)
for n in range(25):
    key = b"shared %02d" % (n % 20)
    save(cache, key, key * 1000, n_tokens=64 + n)
    found = load(cache, key)
    assert found in {None, key * 1000}
    assert sum(e.n_bytes for e in cache._scan().entries.values()) <= OPTIONS.space_bytes
print("done")
"""
    processes = [child(folder, script) for _ in range(2)]
    assert [finish(process) for process in processes] == ["done\n", "done\n"]
    assert size(folder) <= OPTIONS.space_bytes
    assert {name[-3:] for name in files(folder)} == {".kv"}
    whole = [n for n in range(20) if load(cache, b"shared %02d" % n) == b"shared %02d" % n * 1000]
    assert len(whole) == len(files(folder)) >= 8


def test_many_threads_share_a_cache(cache, folder):
    def work(worker: int) -> int:
        n_found = 0
        for n in range(25):
            key = b"shared %02d" % ((n * worker) % 20)
            save(cache, key, key * 1000, n_tokens=64 + n, tool_map={key: b"%d" % worker})
            found = load(cache, key)
            assert found in {None, key * 1000}
            n_found += found is not None
            assert set(cache.tool_blocks([key])) <= {key}
        return n_found

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 5), timeout=120))
    assert size(folder) <= OPTIONS.space_bytes
    assert {name[-3:] for name in files(folder)} == {".kv"}


def test_a_lock_that_is_never_given_back_costs_the_save_only(cache, folder, monkeypatch, caplog):
    save(cache, CHAT)
    monkeypatch.setattr(kvc_files, "_LOCK_SECONDS", 0.0)
    with kvc_files.locked(folder):
        assert not save(cache, LONGER)
        assert load(cache, LONGER) == b"payload"
    assert "held by another process" in warnings(caplog)[0]
    assert save(cache, LONGER)


def test_a_folder_that_vanishes_is_a_warning(cache, folder, caplog):
    save(cache, CHAT)
    folder.rename(folder.with_name("gone"))
    assert cache.find(CHAT) is None
    assert not save(cache, CHAT)
    assert cache.tool_blocks([b"i"]) == {}
    assert len(warnings(caplog)) == 1
    folder.with_name("gone").rename(folder)
    assert load(cache, CHAT) == b"payload"


def test_a_folder_that_can_not_be_used_is_said_at_once(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for bad in ("file", "file/below"):
        with pytest.raises(ConfigError, match=r"disk cache .*file.*name a folder"):
            DiskCache(tmp_path / bad, OPTIONS, IDENTITY)


def test_a_folder_that_exists_keeps_its_mode(tmp_path):
    (tmp_path / "kv").mkdir(mode=0o755)
    DiskCache(tmp_path / "kv", OPTIONS, IDENTITY)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o755
