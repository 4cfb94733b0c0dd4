"""Models, cuts, ports, layers and files that do not fit: one clear sentence each."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ds4py.cli.server import server as server_command
from ds4py.quant.tensor import QuantTensor
from tests.e2e.support import (
    command,
    coordinator,
    endless_toy,
    route,
    worker,
)
from tests.processes import Launcher, wait_for
from tests.toys import toy_llama


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that are not quite the coordinator's."""
    folder = tmp_path_factory.mktemp("strangers")
    return {
        "model family mismatch": endless_toy(folder / "name.gguf", name="another llama"),
        "model id mismatch": endless_toy(folder / "layers.gguf", n_layers=8),
    }


@pytest.mark.parametrize("dial_in", [False, True])
@pytest.mark.parametrize("reason", ["model family mismatch", "model id mismatch"])
def test_a_worker_with_another_model_is_refused_on_both_sides(
    toy: Path,
    strangers: dict[str, Path],
    reason: str,
    dial_in: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with ExitStack() as stack:
        other = strangers[reason]
        if dial_in:
            server = stack.enter_context(coordinator(toy))
            stack.enter_context(worker(other, "0-5", coordinator=server.address))
        else:
            stranger = stack.enter_context(worker(other, "0-5"))
            server = stack.enter_context(coordinator(toy, route=route(stranger)))

        def said(*rooms: str) -> bool:
            names = {f"ds4py.{room}" for room in rooms}
            lines = [r.getMessage() for r in caplog.records if r.name in names]
            return any(reason in line for line in lines)

        wait_for(lambda: said("worker.worker", "worker.connection"), "the worker says why")
        wait_for(
            lambda: said("coordinator.relay.coordinator", "coordinator.relay.workers.dialer"),
            "the coordinator says why",
        )
        assert server.health()["missing"] == "layers 0-5 and the output head"


@pytest.mark.parametrize(
    ("cuts", "missing"),
    [
        (["0-1", "3-5"], "layer 2"),
        (["2-5"], "layers 0-1"),
        (["0-2", "4:5"], "layer 3"),
        (["0-2", "3:5"], "the output head"),
        (["0-3", "3-5"], "from layer 4 on"),
        (["0-3", "3-5"], "(layers 3-5 and the output head) overlaps it"),
    ],
)
def test_health_names_a_gap_and_an_overlap(toy: Path, cuts: list[str], missing: str) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(toy, layers)) for layers in cuts]
        server = stack.enter_context(coordinator(toy, route=route(*workers)))
        wait_for(lambda: len(server.health()["stages"]) == 1 + len(cuts), "every worker is known")
        health = server.health()
        assert health["http_status"] == 503
        assert missing in health["missing"]
        assert "Traceback" not in str(health)


@pytest.mark.parametrize(
    "role",
    [
        ("--role", "worker", "--layers", "0:2", "--listen", "127.0.0.1"),
        ("--dist-route", "127.0.0.1:1", "--listen", "127.0.0.1"),
        ("--host", "127.0.0.1", "--port"),
    ],
    ids=["worker", "coordinator", "HTTP"],
)
def test_a_port_in_use_is_status_2_and_named_before_anything_is_loaded(
    role: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        args = (*role, port, "-m", "/no/such/model.gguf", "-t", 1, "-c", 64)
        assert command(server_command, "ds4py-server", *args) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"127.0.0.1:{port}" in err
    assert "choose another port" in err


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("5:3", "reversed"),
        (":4", "not a layer range"),
        ("0-99", "the model has layers 0-5"),
        ("0:20,output", "not a layer range"),
        ("output", "not a layer range"),
        ("0-output", "write 0:output"),
        ("6:output", "the model has layers 0-5"),
        ("-1:3", "not a layer range"),
    ],
)
def test_unusable_layers_are_status_2_and_one_sentence(
    toy: Path, layers: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(toy, layers) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert words in err


def serve(model: Path, layers: str) -> int:
    """Run the worker's command in this process; it must not get as far as serving."""
    return command(
        server_command,
        "ds4py-server",
        *("--dist-role", "worker", "--dist-listen", "127.0.0.1:0", "-t", 1),
        *(f"--model={model}", f"--dist-layers={layers}"),
    )


# --- files that are no models --------------------------------------------------------------------


def with_unknown_type(data: bytes, tensor: bytes) -> bytes:
    """Change the type of one tensor in the directory to one that nobody knows."""
    at = data.index(tensor) + len(tensor)
    n_dims = struct.unpack_from("<I", data, at)[0]
    at += 4 + 8 * n_dims
    return data[:at] + struct.pack("<I", 99) + data[at + 4 :]


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "HTML": (lambda _: b"<!DOCTYPE html>\n<html><body>not found</body></html>", "HTML page"),
    "LFS": (
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "git-LFS pointer",
    ),
    "empty": (lambda _: b"", "it is empty"),
    "big-endian": (lambda data: b"FUGG" + data[4:], "big-endian"),
    "big-endian version": (lambda data: data[:4] + data[7:3:-1] + data[8:], "big-endian"),
    "one byte short": (lambda data: data[:-1], "incomplete"),
    "half": (lambda data: data[: len(data) // 2], "incomplete"),
    "half a directory": (lambda data: data[:9000], "incomplete"),
    "unknown type": (lambda data: with_unknown_type(data, b"blk.4.ffn_up.weight"), "blk.4.ffn_up"),
}


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong must be said before the first weight is read."""

    def load(*_: object) -> None:
        raise AssertionError("a weight was loaded")

    monkeypatch.setattr(QuantTensor, "from_bytes", load)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file_is_status_1_and_one_sentence(
    toy: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = FILES[kind]
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(toy.read_bytes()))
    assert serve(path, "3-5") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(path) in err
    assert words in err


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("missing", [False, True], ids=["folder", "nowhere"])
def test_what_is_no_file_is_status_1_and_one_sentence(
    tmp_path: Path, missing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" if missing else tmp_path
    assert serve(path, "0-1") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(path) in err


@pytest.mark.usefixtures("no_loading")
def test_a_missing_shard_of_the_slice_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = in_shards(tmp_path)
    shards[1].unlink()
    assert serve(shards[0], "2-3") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert shards[1].name in err


def in_shards(folder: Path) -> list[Path]:
    """A toy in three files; all of layer 0 is in the first one, layers 2 and 3 in the second."""
    toy_llama(folder / "split.gguf", n_layers=6, n_shards=3)
    return [folder / f"split-0000{k}-of-00003.gguf" for k in (1, 2, 3)]


def test_damage_outside_the_slice_is_no_obstacle_and_a_bad_file_ends_the_program(
    tmp_path: Path,
) -> None:
    """As real programs: a missing shard and an unknown type in layers of others, then HTML."""
    shards = in_shards(tmp_path)
    shards[1].unlink()
    shards[2].write_bytes(with_unknown_type(shards[2].read_bytes(), b"blk.5.ffn_up.weight"))
    page = tmp_path / "page.gguf"
    page.write_bytes(b"<html></html>")
    role = ("--role", "worker", "--listen", "127.0.0.1", 0)
    with Launcher(tmp_path) as launch:
        served = launch.start("ds4py-server", *role, "--layers", "0:0", "-m", shards[0], "-t", 1)
        refused = launch.start("ds4py-server", *role, "--layers", "0:1", "-m", page, "-t", 1)
        assert refused.wait_exit() == 1
        assert refused.log.count("\n") == 1
        assert "HTML page" in refused.log
        served.wait_log("ready: worker on")
        assert served.stop() == 0
