"""Settings: wire-protocol.md#environment, addresses and routes, values that do not exist."""

import os
from pathlib import Path

import pytest

from ds4py.config import (
    Address,
    CoordinatorConfig,
    EngineConfig,
    PrefillTuning,
    RouteEntry,
    ServerConfig,
    SocketConfig,
    WorkerConfig,
    WorkerTuning,
    parse_cores,
    parse_route,
    read_environment,
)
from ds4py.errors import ConfigError
from ds4py.layer_range import LayerSpec

# variable, room and field, smallest, largest, default
RANGED = [
    ("DS4_DIST_SOCKET_BUFFER_MB", "socket.buffer_mb", 0, 512, 128),
    ("DS4_DIST_SOCKET_TIMEOUT_SEC", "socket.send_timeout", 1, 3600, 60),
    ("DS4_DIST_SOCKET_RECV_TIMEOUT_SEC", "socket.recv_timeout", 1, 3600, None),
    ("DS4_DIST_WORKER_PREFETCH_DEPTH", "worker.prefetch_depth", 1, 8, 2),
    ("DS4_DIST_WORKER_FORWARD_WINDOW", "worker.forward_window", 1, 64, 4),
    ("DS4_DIST_PREFILL_SEND_DEPTH", "prefill.send_depth", 1, 8, 2),
    ("DS4_METAL_GRAPH_RAW_CAP", "raw_cap", 1, 2**32 - 1, None),
]
FATAL = [
    ("DS4_DIST_PREFILL_CHUNK", "prefill.chunk", 1, 2**32 - 1),
    ("DS4_DIST_PREFILL_WINDOW", "prefill.window", 1, 64),
]
PRESENCE = [
    ("DS4_DIST_CONNECT_TRACE", "socket.connect_trace", True),
    ("DS4_DIST_DISABLE_WORKER_PREFETCH", "worker.prefetch", False),
    ("DS4_DIST_DISABLE_BATCHING", "worker.batching", False),
    ("DS4_DIST_DISABLE_PREFILL_PIPELINE", "prefill.pipeline", False),
    ("DS4_DIST_DISABLE_PREFILL_ACK_ONLY", "prefill.ack_only", False),
    ("DS4_DIST_DECODE_PROFILE", "decode_profile", True),
    ("DS4_DIST_DECODE_PROFILE", "worker.decode_profile", True),
]
NOT_STRICT = ["", " ", "x", "12x", "1.0", "0x8", "1 ", "--1", "1_0", "٣", "9" * 50]


def setting(name, **env):
    value = read_environment(env)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_an_empty_environment_means_the_defaults():
    env = read_environment({})
    assert (env.socket, env.worker) == (SocketConfig(), WorkerTuning())
    assert env.prefill == PrefillTuning()
    assert env.decode_profile is False


@pytest.mark.parametrize(("variable", "name", "low", "high", "default"), RANGED)
def test_a_ranged_variable_takes_its_range_and_falls_back_outside(
    variable, name, low, high, default
):
    for value in (low, high):
        assert setting(name, **{variable: str(value)}) == value
    assert setting(name, **{variable: f" \t+{high}"}) == high
    for text in (str(low - 1), str(high + 1), *NOT_STRICT):
        assert setting(name, **{variable: text}) == default


@pytest.mark.parametrize(("variable", "name", "low", "high"), FATAL)
def test_a_prefill_variable_with_a_bad_value_fails_the_prefill(variable, name, low, high):
    for value in (low, high):
        assert setting(name, **{variable: str(value)}) == value
    assert setting(name, **{variable: ""}) is None
    for text in (str(low - 1), str(high + 1), *NOT_STRICT[1:]):
        problem = setting(name, **{variable: text})
        assert isinstance(problem, ConfigError)
        assert variable in str(problem)


@pytest.mark.parametrize(("variable", "name", "value"), PRESENCE)
@pytest.mark.parametrize("text", ["", "0", "1"])
def test_a_presence_variable_counts_even_when_empty(variable, name, value, text):
    assert setting(name) is (not value)
    assert setting(name, **{variable: text}) is value


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("DS4_DIST_CONNECT_BIND_HOST", "socket.bind_host"),
        ("DS4_DIST_CONNECT_BIND_IF", "socket.bind_interface"),
    ],
)
def test_a_text_variable_is_unset_when_empty(variable, name):
    assert setting(name, **{variable: "10.0.0.1"}) == "10.0.0.1"
    assert setting(name, **{variable: ""}) is None


@pytest.mark.parametrize(
    ("text", "cap"),
    [("64", 64), (" 64 tokens", 64), ("0", None), ("-5", None), ("many", None), ("", None)],
)
def test_the_prefill_cap_tolerates_a_tail_and_else_means_the_context(text, cap):
    assert setting("prefill.prefill_cap", DS4_METAL_PREFILL_CHUNK=text) == cap


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("DS4_DIST_SOCKET_BUFFER_MB", "7")
    assert read_environment().socket.buffer_mb == 7


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("worker1:8001", "worker1", 8001),
        ("[::1]:0", "::1", 0),
        (" 10.0.0.1:65535 ", "10.0.0.1", 65535),
    ],
)
def test_addresses_are_read(text, host, port):
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:x", "::1:80", "host:65536", "host:-1", "host:٣"]
)
def test_other_addresses_are_refused(text):
    with pytest.raises(ConfigError):
        Address.parse(text)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::"])
def test_a_wildcard_is_known_as_one(host):
    assert Address(host, 1).is_wildcard
    assert not Address("127.0.0.1", 1).is_wildcard


def test_a_route_may_name_the_layers_of_a_plain_peer():
    assert parse_route("a:1, b:2=13:output") == (
        RouteEntry(Address("a", 1)),
        RouteEntry(Address("b", 2), LayerSpec.parse("13:output")),
    )


@pytest.mark.parametrize(
    "text", ["", ",", "a", "a:1,a:1", "a:0", "0.0.0.0:1", "a:1=", "a:1=3:1", "a:1=b"]
)
def test_other_routes_are_refused(text):
    with pytest.raises(ConfigError):
        parse_route(text)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (PrefillTuning, {"window": 0}),
        (PrefillTuning, {"window": 65}),
        (PrefillTuning, {"chunk": 0}),
        (EngineConfig, {"model": Path("m"), "n_ctx": 0}),
        (EngineConfig, {"model": Path("m"), "n_slots": 0}),
        (EngineConfig, {"model": Path("m"), "threads": 0}),
        (EngineConfig, {"model": Path("m"), "device": "tpu"}),
        (CoordinatorConfig, {"activation_bits": 12}),
        (CoordinatorConfig, {"layers": LayerSpec.parse("1:3")}),
        (CoordinatorConfig, {"n_sessions": 0}),
        (WorkerConfig, {"layers": LayerSpec.parse("1:3")}),
        (WorkerConfig, {"layers": LayerSpec.parse("1:3"), "coordinator": Address("0.0.0.0", 1)}),
        (WorkerConfig, {"layers": LayerSpec.parse("1:3"), "coordinator": Address("h", 0)}),
        (ServerConfig, {"max_tokens": 0}),
    ],
)
def test_an_unusable_config_does_not_exist(config, change):
    with pytest.raises(ConfigError):
        config(**change)


def test_usable_configs_exist():
    assert EngineConfig(model=Path("m"), n_ctx=1, threads=1, device="cuda:1").n_slots == 4
    assert CoordinatorConfig(layers=LayerSpec.parse("0:3")).activation_bits == 32
    assert WorkerConfig(layers=LayerSpec.parse("1:3"), listen=Address("", 0)).coordinator is None
    assert WorkerConfig(layers=LayerSpec.parse("1:3"), coordinator=Address("h", 1)).listen is None
    assert ServerConfig().address is None


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("2", (2,)),
        ("2,3", (2, 3)),
        ("4-7", (4, 5, 6, 7)),
        (" 0-1 , 6 ", (0, 1, 6)),
        ("3,3,2-3", (2, 3)),
    ],
)
def test_cores_are_numbers_and_ranges(text, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", ",", "a", "1-", "-1", "3-2", "1.5", "1;2", "0x1", "99999"])
def test_what_names_no_cores_is_refused_with_an_example(text, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    with pytest.raises(ConfigError, match=r"expected cores such as 2,3 or 4-7"):
        parse_cores(text)


def test_cores_that_this_process_may_not_use_are_refused_with_those_that_it_may(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    with pytest.raises(ConfigError, match=r"--dist-pin-cores 2-3: .* the cores 0, 3 only"):
        parse_cores("2-3")


def test_a_system_that_pins_no_threads_says_so(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.raises(ConfigError, match="only Linux"):
        parse_cores("1")


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("127.0.0.1:1", True),
        ("127.8.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
    ],
)
def test_which_addresses_nobody_else_reaches(text: str, alone: bool) -> None:
    assert Address.parse(text).is_loopback is alone


@pytest.mark.parametrize(
    "fields",
    [
        {"max_queue": -1},
        {"request_seconds": 0.0},
        {"grace_seconds": -1.0},
        {"max_tool_ids": -1},
        {"api_key": " "},
        {"api_key": "schl\u00fcssel"},
    ],
)
def test_the_http_front_has_limits_that_make_sense(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**fields)  # type: ignore[arg-type]
