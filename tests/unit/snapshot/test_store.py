"""Files of saved sessions: whole or not at all, checked when read, never lost."""

import hashlib
import logging
import os
import stat

import pytest

from ds4py.errors import SnapshotError
from ds4py.snapshot import store
from ds4py.snapshot.store import read_session, write_session

OLD, NEW = b"old session" * 100, b"new session, longer" * 100


def pieces(payload: bytes) -> list[memoryview]:
    return [memoryview(payload)[at : at + 7] for at in range(0, len(payload), 7)]


def files(folder) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "chat.dsv4"
    write_session(path, pieces(OLD))
    return path


def test_what_was_written_is_read(path):
    assert read_session(path) == OLD
    write_session(path, pieces(NEW))
    assert read_session(path) == NEW
    assert files(path.parent) == ["chat.dsv4", "chat.dsv4.sha256"]


def test_only_the_owner_can_read(path):
    for entry in path.parent.iterdir():
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_the_checksum_is_in_the_usual_form(path):
    listed = (path.parent / "chat.dsv4.sha256").read_text()
    assert listed == f"{hashlib.sha256(OLD).hexdigest()}  chat.dsv4\n"


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_a_damaged_file_is_refused_and_set_aside_once(path, damage, caplog):
    changed = bytearray(OLD)
    if damage == "flip":
        changed[50] ^= 1
    changed = {"flip": changed, "cut": changed[:-1], "grow": changed + b"x"}[damage]
    path.write_bytes(changed)
    with pytest.raises(SnapshotError, match=r"chat\.dsv4: checksum is .* expected .*damaged-1"):
        read_session(path)
    assert files(path.parent) == ["chat.dsv4.damaged-1", "chat.dsv4.damaged-1.sha256"]
    assert (path.parent / "chat.dsv4.damaged-1").read_bytes() == changed
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    with pytest.raises(SnapshotError, match="can not be read: No such file"):
        read_session(path)


def test_a_second_damaged_file_does_not_replace_the_first(path):
    for content in (b"first", b"second"):
        write_session(path, pieces(OLD))
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match="damaged"):
            read_session(path)
    kept = [(path.parent / f"chat.dsv4.damaged-{n}").read_bytes() for n in (1, 2)]
    assert kept == [b"first", b"second"]


def test_a_file_of_another_program_has_no_checksum_and_is_read(path, caplog):
    (path.parent / "chat.dsv4.sha256").unlink()
    assert read_session(path) == OLD
    assert "no checksum" in caplog.text


def test_a_file_that_is_too_large_is_refused_and_stays(path):
    with pytest.raises(SnapshotError, match=f"{len(OLD)} bytes, expected at most 99"):
        read_session(path, max_bytes=99)
    assert read_session(path, max_bytes=len(OLD)) == OLD


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_a_regular_file_is_read(tmp_path, kind):
    path = tmp_path / "odd"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(SnapshotError, match="no regular file"):
        read_session(path)


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(SnapshotError, match=r"nowhere/x: can not be written: No such file"):
        write_session(tmp_path / "nowhere" / "x", pieces(NEW))


class PowerCut(BaseException):
    """Ends a write as a crash would."""


@pytest.mark.parametrize("has_checksum", [True, False])
@pytest.mark.parametrize("step", range(6))
def test_after_a_crash_at_any_step_the_old_or_the_new_session_is_there(
    path, step, has_checksum, monkeypatch
):
    """Each replacement is a flush, then a rename: cut before every one of them."""
    if not has_checksum:
        (path.parent / "chat.dsv4.sha256").unlink()
    left = step

    def counted(call):
        def run(*args):
            nonlocal left
            if left == 0 and not stat.S_ISDIR(os.stat(args[0]).st_mode):
                raise PowerCut
            left -= not stat.S_ISDIR(os.stat(args[0]).st_mode)
            return call(*args)

        return run

    with monkeypatch.context() as patched:
        patched.setattr(store.os, "fsync", counted(os.fsync))
        patched.setattr(store.os, "replace", counted(os.replace))
        with pytest.raises(PowerCut):
            write_session(path, pieces(NEW))
    assert read_session(path) == (OLD if step < 4 else NEW)
    write_session(path, pieces(NEW))
    assert read_session(path) == NEW
    assert files(path.parent) == ["chat.dsv4", "chat.dsv4.sha256"]


def test_a_full_disk_leaves_the_old_session(path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(SnapshotError, match="can not be written: No space left"):
        write_session(path, pieces(NEW))
    assert read_session(path) == OLD
    assert hashlib.sha256(OLD).hexdigest() in (path.parent / "chat.dsv4.sha256").read_text()
