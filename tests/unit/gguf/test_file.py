"""Opening a model: one file or shards, what is found where, which pages are touched."""

import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from ds4py.errors import GgufError, ModelError, UnsupportedQuantError
from ds4py.gguf.file import GgufFile
from tests.toys import build_gguf, gguf_bytes, packed, tensor, toy_llama
from tools.gguf_writer import TensorSource

MB = 1 << 20


def resident_bytes(path: Path) -> int:
    """Bytes of a mapped file that are in this process's memory now."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """Three shards of two tensors each: t0 t1, t2 t3, t4 t5; each 32 bytes of its own number."""
    tensors = [tensor(f"t{k}", (8,), fill=k) for k in range(6)]
    build_gguf(tmp_path / "m.gguf", {"general.name": "split model"}, tensors, n_shards=3)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_raw_gives_the_packed_bytes_read_only(tmp_path: Path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = build_gguf(tmp_path / "m.gguf", {"k": 1}, [packed("x", values)])
    with GgufFile.open(path) as file:
        view = file.raw("x")
        assert (view.readonly, view.format, view.nbytes) == (True, "B", 24)
        assert np.array_equal(np.frombuffer(view, np.float32).reshape(file.info("x").shape), values)
        assert file.metadata.require_int("k") == 1
        assert file.n_bytes == path.stat().st_size


def test_raw_does_not_copy(tmp_path: Path):
    path = build_gguf(tmp_path / "m.gguf", {}, [tensor("x", (8,), fill=1)])
    with GgufFile.open(str(path)) as file:
        view = file.raw("x")
        with path.open("r+b") as stream:
            stream.seek(file.info("x").offset)
            stream.write(b"\x07")
        assert view[0] == 7


def test_views_outlive_the_file_and_closing_twice_is_fine(tmp_path: Path):
    file = GgufFile.open(build_gguf(tmp_path / "m.gguf", {}, [tensor("x", (8,), fill=9)]))
    view = file.raw("x")
    file.close()
    file.close()
    assert bytes(view) == b"\x09" * 32
    with pytest.raises(GgufError, match="tensor x was asked for after closing"):
        file.raw("x")
    file.release("x")


def test_an_absent_tensor_of_a_complete_file_is_named(tmp_path: Path):
    with (
        GgufFile.open(build_gguf(tmp_path / "m.gguf", {}, [tensor("x", (8,))])) as file,
        pytest.raises(GgufError, match="the file has no tensor y, z"),
    ):
        file.require(["x", "y", "z"])


def test_an_unknown_type_harms_only_those_who_ask_for_it(tmp_path: Path):
    tensors = [tensor("good", (8,)), tensor("odd", (8,), 250), tensor("strange", (8,), 251)]
    with GgufFile.open(build_gguf(tmp_path / "m.gguf", {}, tensors)) as file:
        file.require(["good"])
        assert file.info("odd").type_id == 250
        with pytest.raises(UnsupportedQuantError, match=r"odd \(type 250\), strange \(type 251\)"):
            file.require(["odd", "good", "strange"])
        with pytest.raises(UnsupportedQuantError, match="convert the model"):
            file.raw("odd")


def test_who_decodes_says_which_types_are_good(tmp_path: Path):
    tensors = [tensor("a", (32,), "Q8_0"), tensor("b", (32,), "Q8_1")]
    with GgufFile.open(build_gguf(tmp_path / "m.gguf", {}, tensors)) as file:
        file.require(["a", "b"])
        with pytest.raises(UnsupportedQuantError, match=r"b \(Q8_1\)"):
            file.require(["a", "b"], can_decode=lambda type_id: type_id == 8)


def test_absent_and_undecodable_tensors_are_told_together(tmp_path: Path):
    with (
        GgufFile.open(build_gguf(tmp_path / "m.gguf", {}, [tensor("odd", (8,), 250)])) as file,
        pytest.raises(GgufError, match=r"no tensor gone.*odd \(type 250\)"),
    ):
        file.require(["odd", "gone"])


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_whole_model(split: list[Path], given: int):
    with GgufFile.open(split[given]) as file:
        assert list(file.tensors) == [f"t{k}" for k in range(6)]
        assert [info.shard for info in file.tensors.values()] == [0, 0, 1, 1, 2, 2]
        assert [file.raw(f"t{k}")[0] for k in range(6)] == list(range(6))
        assert file.metadata.require_str("general.name") == "split model"
        assert (file.n_shards, file.missing_shards) == (3, ())
        assert file.n_bytes == sum(path.stat().st_size for path in split)


def test_missing_shards_matter_only_when_their_tensors_are_needed(split: list[Path]):
    split[0].unlink()
    split[2].unlink()
    with GgufFile.open(split[1]) as file:
        file.require(["t2", "t3"])
        assert file.raw("t3")[0] == 3
        assert file.missing_shards == ("m-00001-of-00003.gguf", "m-00003-of-00003.gguf")
        with pytest.raises(GgufError, match=r"m-00001-of-00003.gguf, m-00003-of-00003.gguf.*t0"):
            file.require(["t0", "t2"])
        with pytest.raises(GgufError, match="needs the missing shards"):
            file.raw("t5")


def test_without_the_first_shard_a_missing_key_says_so(split: list[Path]):
    split[0].unlink()
    with (
        GgufFile.open(split[1]) as file,
        pytest.raises(ModelError, match=r"got nothing .the first shard, m-00001-of-00003.gguf, is"),
    ):
        file.metadata.require_str("general.name")


def test_a_renamed_shard_is_refused(split: list[Path]):
    odd = split[1].rename(split[1].with_name("other.gguf"))
    with pytest.raises(GgufError, match=r"other.gguf: it is one of 3 shards .* original names"):
        GgufFile.open(odd)


def test_swapped_shards_are_refused(split: list[Path]):
    shutil.copyfile(split[1], split[2])
    with pytest.raises(GgufError, match=r"inside it is shard 2 of 3, by its name 3 of 3"):
        GgufFile.open(split[0])


def test_a_shard_of_another_model_is_refused(split: list[Path], tmp_path: Path):
    more = [tensor(f"u{k}", (8,)) for k in range(9)]
    build_gguf(tmp_path / "n.gguf", {}, more, n_shards=3)
    shutil.copyfile(tmp_path / "n-00003-of-00003.gguf", split[2])
    with pytest.raises(GgufError, match="the shards hold 7 tensors, expected 6"):
        GgufFile.open(split[0])


def test_a_tensor_in_two_shards_is_refused(split: list[Path], tmp_path: Path):
    same = [tensor(f"t{k}", (8,)) for k in (0, 1, 2, 3, 0, 5)]
    build_gguf(tmp_path / "n.gguf", {}, same, n_shards=3)
    shutil.copyfile(tmp_path / "n-00003-of-00003.gguf", split[2])
    with pytest.raises(GgufError, match=r"tensor t0 is in m-00001-of-00003.gguf too"):
        GgufFile.open(split[0])


def test_a_truncated_sibling_is_found_at_open(split: list[Path]):
    os.truncate(split[2], split[2].stat().st_size - 1)
    with pytest.raises(GgufError, match=r"m-00003-of-00003.gguf: .*tensor t5 is the first"):
        GgufFile.open(split[0])


def test_a_file_that_only_looks_like_a_shard_is_a_plain_file(tmp_path: Path):
    path = build_gguf(tmp_path / "m-00002-of-00007.gguf", {}, [tensor("x", (8,))])
    with GgufFile.open(path) as file:
        assert file.missing_shards == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"<!doctype html><title>404</title>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x89PNG\r\n", "begins with"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf_bytes({}, [tensor("x", (64,))])[:-1], "tensor x .* 1 bytes are missing"),
        (gguf_bytes({}, [tensor("x", (64,))])[:30], "cut off inside the directory entry|cut off"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=f"{re.escape(str(path))}: .*({words})") as caught:
        GgufFile.open(path)
    assert caught.value.path == path


def test_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(GgufError, match=r"it is a folder, expected a .gguf file"):
        GgufFile.open(tmp_path)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(GgufError, match="there is no such file"):
        GgufFile.open(tmp_path / "none.gguf")


def test_a_path_through_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(GgufError, match="cannot be read: Not a directory"):
        GgufFile.open(tmp_path / "file" / "m.gguf")


def test_an_impossible_path_is_refused():
    with pytest.raises(GgufError, match="cannot be a path"):
        GgufFile.open("a\0b.gguf")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GgufError, match="not a regular file"):
        GgufFile.open(tmp_path / "pipe")


def test_open_touches_the_front_only_and_memory_follows_the_slice(tmp_path: Path):
    """A file of 2 GB of holes: opened, one tensor read, and given back."""
    n_values = 1 << 29
    tensors = [
        TensorSource("mine", 0, (2 * MB,), bytes(8 * MB)),
        TensorSource("huge", 250, (n_values,), b""),
    ]
    raw = bytearray(gguf_bytes({"k": "v"}, tensors))
    at = raw.index(b"huge") + len(b"huge") + 4 + 8
    raw[at : at + 4] = struct.pack("<I", 0)  # from here on it is F32, and 2 GiB long
    path = tmp_path / "holes.gguf"
    path.write_bytes(raw)
    os.truncate(path, len(raw) + 4 * n_values)
    with GgufFile.open(path) as file:
        assert file.info("huge").n_bytes == 4 * n_values
        assert resident_bytes(path) < MB
        assert not any(file.raw("mine"))
        assert 8 * MB <= resident_bytes(path) < 10 * MB
        file.release("mine")
        assert resident_bytes(path) < MB
        assert file.raw("mine")[0] == 0


def test_a_refused_file_is_unmapped(tmp_path: Path):
    path = toy_llama(tmp_path / "m.gguf", n_shards=2)
    sibling = path.with_name("m-00002-of-00002.gguf")
    sibling.write_bytes(b"nonsense")
    with pytest.raises(GgufError):
        GgufFile.open(path)
    maps = Path("/proc/self/maps").read_text()
    assert path.name not in maps
    assert sibling.name not in maps
