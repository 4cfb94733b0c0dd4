"""Flags and the configs they become: spellings, exclusions, ranges."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

from ds4py.cli import exits
from ds4py.cli.client import client
from ds4py.cli.flags.shared import (
    DistributedFlags,
    ModelFlags,
    distributed_options,
    local_config,
    model_options,
    sampling,
    take,
)
from ds4py.cli.server import HttpFlags, server
from ds4py.config import Address, RouteEntry, SamplingParams, read_environment
from ds4py.errors import ConfigError
from ds4py.layer_range import LayerSpec

ENVIRONMENT = read_environment({})


def http(**given) -> HttpFlags:
    """Flags of the HTTP front as `ds4py-server` has them by default."""
    with server.make_context("ds4py-server", ["-m", "x.gguf"]) as context:
        return HttpFlags(**(take(dict(context.params), HttpFlags) | given))


def parse(*args: str) -> tuple[DistributedFlags, ModelFlags]:
    """Read a command line as the programs do."""
    got: list = []

    @click.command()
    @distributed_options
    @model_options
    def command(**flags) -> None:
        flags.pop("debug")
        got.append(DistributedFlags(**take(flags, DistributedFlags)))
        got.append(ModelFlags(**take(flags, ModelFlags)))
        assert not flags

    command.main(list(args), standalone_mode=False)
    return got[0], got[1]


def worker(*args: str):
    return parse(*args)[0].worker(ENVIRONMENT)


def coordinator(*args: str):
    return parse(*args)[0].coordinator_config(ENVIRONMENT, 3)


@pytest.mark.parametrize(
    ("args", "role"),
    [
        ("", "none"),
        ("--role none", "none"),
        ("--role worker", "worker"),
        ("--dist-role coordinator", "coordinator"),
        ("--dist-route a:1", "coordinator"),  # naming workers to dial says it
    ],
)
def test_the_role(args: str, role: str) -> None:
    assert parse(*args.split())[0].role == role


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--dist-layers 0-1", "--dist-layers"),
        ("--layers 0:1", "--dist-layers"),
        ("--dist-listen a:1", "--dist-listen"),
        ("--listen a 1", "--dist-listen"),
        ("--dist-coordinator a:1", "--dist-coordinator"),
        ("--coordinator a 1", "--dist-coordinator"),
        ("--dist-prefill-chunk 1", "--dist-prefill-chunk"),
        ("--dist-prefill-window 1", "--dist-prefill-window"),
        ("--dist-activation-bits 8", "--dist-activation-bits"),
        ("--dist-rejoin-timeout 1", "--dist-rejoin-timeout"),
        ("--dist-result-timeout 1", "--dist-result-timeout"),
        ("--dist-replay-check", "--dist-replay-check"),
        ("--role none --dist-route a:1", "--dist-route"),
    ],
)
def test_distributed_values_need_a_role(args: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named} needs a role"):
        _ = parse(*args.split())[0].role


@pytest.mark.parametrize(
    "args",
    [
        "--dist-role worker --dist-layers 13:output --dist-listen h:8001 --dist-coordinator c:8000",
        "--role worker --layers 13:output --listen h 8001 --coordinator c 8000",
    ],
)
def test_both_spellings_of_a_worker_say_the_same(args: str) -> None:
    config = worker(*args.split())
    assert config.layers == LayerSpec(13, None)
    assert config.listen == Address("h", 8001)
    assert config.coordinator == Address("c", 8000)


def test_ds4s_spelling_takes_ipv6_hosts() -> None:
    config = worker(*["--role", "worker", "--layers", "0:1", "--listen", "::1", "8001"])
    assert config.listen == Address("::1", 8001)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--dist-listen h:1", "needs its layers"),
        ("--dist-layers 0-1", "nobody could reach it"),
        ("--dist-layers 1-0 --dist-listen h:1", "reversed"),
        ("--dist-layers x --dist-listen h:1", "not a layer range"),
        ("--dist-layers 0-1 --dist-listen h", "expected HOST:PORT"),
        ("--dist-layers 0-1 --dist-listen h:99999", "port 99999"),
        ("--dist-layers 0-1 --listen h 1 --dist-listen h:1", "say the same"),
        ("--dist-layers 0-1 --coordinator h 1 --dist-coordinator h:1", "say the same"),
        ("--dist-layers 0-1 --dist-coordinator 0.0.0.0:1", "can be dialled"),
        ("--dist-layers 0-1 --dist-coordinator h:0", "can be dialled"),
        ("--dist-layers 0-1 --dist-listen h:1 --dist-route w:1", "--dist-route is for coord"),
        ("--dist-layers 0-1 --dist-listen h:1 --dist-prefill-chunk 1", "is for coordinators"),
        ("--dist-layers 0-1 --dist-listen h:1 --dist-activation-bits 8", "is for coordinators"),
        ("--dist-layers 0-1 --dist-listen h:1 --dist-replay-check", "is for coordinators"),
    ],
)
def test_an_unusable_worker_is_explained(args: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worker("--role", "worker", *args.split())


def test_a_coordinator_takes_everything() -> None:
    config = coordinator(
        *["--dist-route", "a:1,b:2=13:output", "--dist-listen", "[::]:8000"],
        *["--dist-layers", "0-3", "--dist-prefill-chunk", "7", "--dist-prefill-window", "64"],
        *[
            "--dist-activation-bits",
            "16",
            "--dist-rejoin-timeout",
            "1.5",
            "--dist-result-timeout",
            "9",
        ],
        "--dist-replay-check",
    )
    assert config.route == (
        RouteEntry(Address("a", 1)),
        RouteEntry(Address("b", 2), LayerSpec(13, None)),
    )
    assert config.listen == Address("::", 8000)
    assert config.layers == LayerSpec(0, 3, head_if_last=True)
    assert (config.prefill.chunk, config.prefill.window) == (7, 64)
    assert (config.activation_bits, config.n_sessions) == (16, 3)
    assert (config.rejoin_timeout, config.result_timeout) == (1.5, 9)


def test_a_coordinators_defaults() -> None:
    config = coordinator("--dist-listen", "h:8000")
    assert (config.activation_bits, config.layers, config.route) == (32, None, ())
    assert (config.prefill.chunk, config.prefill.window) == (None, None)


def test_flags_come_before_the_environment() -> None:
    environment = read_environment(
        {"DS4_DIST_PREFILL_CHUNK": "5", "DS4_DIST_PREFILL_WINDOW": "nonsense"}
    )
    flags = parse(*["--dist-listen", "h:1", "--dist-prefill-window", "3"])[0]
    tuning = flags.coordinator_config(environment, 1).prefill
    assert (tuning.chunk, tuning.window) == (5, 3)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", "needs workers"),
        ("--dist-listen h:1 --dist-coordinator c:1", "dials no coordinator"),
        ("--dist-listen h:1 --dist-layers 1-2", "must start at 0"),
        ("--dist-listen h:1 --dist-prefill-window 65", "expected 1 to 64"),
        ("--dist-listen h:1 --dist-prefill-window 0", "expected 1 to 64"),
        ("--dist-listen h:1 --dist-prefill-chunk 0", "at least 1"),
        ("--dist-route ,", "no worker named"),
        ("--dist-route a:1,a:1", "stands there twice"),
        ("--dist-route *:1", "can be dialled"),
    ],
)
def test_an_unusable_coordinator_is_explained(args: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        coordinator("--role", "coordinator", *args.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", "no model"),
        ("-m m.gguf -c 0", "context 0"),
        ("-m m.gguf --sessions 0", "sessions 0"),
        ("-m m.gguf -t 0", "threads 0"),
        ("-m m.gguf --device gpu", "device 'gpu'"),
    ],
)
def test_an_unusable_engine_is_explained(args: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(*args.split())[1].engine(ENVIRONMENT)


def test_the_engines_flags() -> None:
    flags = parse(
        *[
            "-m",
            "m.gguf",
            "-c",
            "512",
            "-t",
            "2",
            "--device",
            "cuda:1",
            "--precision",
            "f32",
            "--sessions",
            "9",
        ]
    )[1]
    engine = flags.engine(ENVIRONMENT)
    assert (engine.model, engine.n_ctx, engine.threads) == (Path("m.gguf"), 512, 2)
    assert (engine.device, engine.precision, engine.n_slots) == ("cuda:1", "f32", 9)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("temperature", -0.1, "--temp -0.1"),
        ("temperature", 101, "--temp 101"),
        ("top_p", 1.1, "--top-p"),
        ("min_p", -1, "--min-p"),
        ("seed", 0, "--seed 0"),
        ("temperature", float("nan"), "--temp nan"),
    ],
)
def test_sampling_out_of_range_is_explained(name, value, shown) -> None:
    with pytest.raises(ConfigError, match=shown):
        sampling(SamplingParams(), **{name: value})


def test_given_sampling_flags_stand_over_the_defaults() -> None:
    defaults = SamplingParams(temperature=0.5, min_p=0.1)
    assert sampling(defaults, temperature=0.0, top_k=None) == SamplingParams(
        temperature=0.0, min_p=0.1
    )


@pytest.mark.parametrize(
    ("fields", "shared", "address"),
    [
        ({}, False, Address("127.0.0.1", 8000)),
        ({}, True, None),
        ({"http": "h:1"}, True, Address("h", 1)),
        ({"http": ":1"}, False, Address("127.0.0.1", 1)),
        ({"http": "1"}, False, Address("127.0.0.1", 1)),
        ({"host": "h"}, False, Address("h", 8000)),
        ({"port": 0}, True, Address("127.0.0.1", 0)),
    ],
)
def test_the_http_address(fields, shared, address) -> None:
    assert http(**fields).config(shared, SamplingParams()).address == address


def test_two_ways_to_name_the_http_address_exclude_each_other() -> None:
    flags = http(http="h:1", port=1)
    with pytest.raises(ConfigError, match="say the same"):
        flags.config(False, SamplingParams())


def test_the_server_has_the_limits_of_its_flags() -> None:
    config = http(max_queue=3, request_timeout=2.5, grace=1.5, nothink=True).config(
        True, SamplingParams()
    )
    assert (config.max_queue, config.request_seconds, config.grace_seconds) == (3, 2.5, 1.5)
    assert (config.think, config.exact_replay, config.max_tool_ids) == ("none", True, 100_000)
    usual = http().config(True, SamplingParams())
    assert (usual.think, usual.api_key, usual.request_seconds) == (None, None, None)
    replaying = [p for p in server.params if "--disable-exact-dsml-tool-replay" in p.opts]
    assert (replaying[0].default, replaying[0].flag_value) == (True, False)


def test_an_api_key_from_a_file(tmp_path) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    config = http(api_key_file=path).config(True, SamplingParams())
    assert config.api_key == "secret"
    assert "secret" not in repr(config)
    with pytest.raises(ConfigError, match="say the same"):
        http(api_key_file=path, api_key="x").config(True, SamplingParams())
    with pytest.raises(ConfigError, match="No such file"):
        http(api_key_file=tmp_path / "none").config(True, SamplingParams())
    with pytest.raises(ConfigError, match="API key"):
        http(api_key=" ").config(True, SamplingParams())


@pytest.mark.parametrize(
    ("command", "args", "status", "words"),
    [
        (server, [], 2, "no model"),
        (server, ["--nonsense"], 2, "No such option"),
        (server, ["-m", "x.gguf", "--role", "chief"], 2, "chief"),
        (server, ["-m", "x.gguf", "--role", "worker"], 2, "needs its layers"),
        (server, ["-m", "x.gguf", "--role", "coordinator"], 2, "needs workers"),
        (server, ["-m", "x.gguf", "-n", "0"], 2, "max tokens 0"),
        (server, ["-m", "/no/such/file.gguf"], 1, "/no/such/file.gguf"),
        (server, ["--help"], 0, ""),
        (server, ["--version"], 0, ""),
        (client, ["-p", "x"], 2, "no model"),
        (client, ["-p", "x", "--prompt-ids", "1"], 2, "give one of"),
        (client, ["--prompt-ids", "1,x", "-m", "m"], 2, "expected token ids"),
        (client, ["--prompt-file", "/no/such", "-m", "m"], 2, "--prompt-file /no/such"),
        (client, ["-p", "x", "-n", "0", "-m", "m"], 2, "--max-tokens 0"),
        (client, ["-p", "x", "--host", "nowhere"], 2, "expected HOST:PORT"),
        (client, ["-p", "x", "--host", "h:1", "-m", "m"], 2, "drop --model"),
        (client, ["-p", "x", "--host", "h:1", "--dist-route", "a:1"], 2, "drop --model"),
        (client, ["-p", "x", "-m", "m", "--role", "worker"], 2, "ds4py-server"),
        (client, ["-p", "x", "--temp", "101", "-m", "m"], 2, "--temp 101"),
        (client, ["--help"], 0, ""),
    ],
)
def test_bad_usage_ends_with_a_status_and_a_line(command, args, status, words, capsys) -> None:
    assert exits.exit_status(command, "prog", args) == status
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == (status != 0)


@pytest.mark.parametrize("program", ["server", "client", "main"])
def test_help_imports_nothing_heavy(program: str) -> None:
    code = (
        "import sys\n"
        "from ds4py.cli import exits\n"
        "exits.leave = sys.exit\n"  # the test looks around before the process ends
        f"from ds4py.cli.{program} import main\n"
        "sys.argv = ['prog', '--help']\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'tokenizers', 'numpy.random'}\n"
        "print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_process_with_all_layers_heeds_the_environment_too() -> None:
    environment = read_environment({"DS4_DIST_DECODE_PROFILE": "", "DS4_DIST_PREFILL_CHUNK": "7"})
    config = local_config(environment, 3)
    assert (config.decode_profile, config.prefill.chunk, config.n_sessions) == (True, 7, 3)


def test_cores_of_network_threads_become_an_option_of_sockets(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("DS4_DIST_SOCKET_BUFFER_MB", "3")
    read = read_environment()
    flags, _ = parse("--role", "worker", "--dist-pin-cores", "2-3")
    assert flags.environment().socket == replace(read.socket, cores=(2, 3))
    assert parse("--role", "worker")[0].environment() == read
    with pytest.raises(ConfigError, match="needs a role"):
        _ = parse("--dist-pin-cores", "1")[0].role
