"""Every setting of ds4py, frozen, split by its reader; the only reader of the environment.

Owns: the config classes, the `DS4_*` variables with their ranges and invalid-value rules
(docs/spec/wire-protocol.md#environment). Refuses to know: flags (cli/), what is learnt at run time.
Invariant: a config object that exists is valid.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ds4py.config.address import Address as Address
from ds4py.config.address import RouteEntry as RouteEntry
from ds4py.config.address import parse_route as parse_route
from ds4py.errors import ConfigError
from ds4py.layer_range import LayerSpec

DEFAULT_PORT: Final = 8000
DEFAULT_PREFILL_CAP: Final = 4096
DEFAULT_CTX: Final = 32768
DEFAULT_ALIVE_TIMEOUT: Final = 10.0
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_STRICT_INT = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]+", re.ASCII)

DeviceName = str
Precision = Literal["auto", "f32", "bf16"]
ActQuant = Literal["auto", "cpu", "none"]
KvType = Literal["auto", "f32", "bf16", "f16", "q8_0"]


def parse_size(text: str) -> int:
    """Read a number of bytes such as `8G`, `1.5GiB` or `512m`; units are powers of 1024.

    Raises:
        ConfigError: The text has another form, or means less than one byte.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * 1024 ** " kmgt".index(found[2].lower() or " ")) if found else 0
    if size < 1:
        raise ConfigError(f"size {text!r}: expected a number with K, M, G or T, for example 8G")
    return size


def cache_folder(env: Mapping[str, str] | None = None) -> Path:
    """Return the user's folder for what can be found out again (XDG_CACHE_HOME, or ~/.cache)."""
    source = os.environ if env is None else env
    base = source.get("XDG_CACHE_HOME") or ""
    # a relative path is invalid by the XDG specification, and would depend on where one stands
    root = Path(base) if Path(base).is_absolute() else Path(source.get("HOME") or "~").expanduser()
    return (root if Path(base).is_absolute() else root / ".cache") / "ds4py"


def parse_cores(text: str) -> tuple[int, ...]:
    """Read `--dist-pin-cores`: numbers and ranges, such as 2,3 or 4-7.

    Raises:
        ConfigError: The text has another form, names cores that this process may not use, or the
            system cannot keep threads on cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(f"--dist-pin-cores {text}: only Linux can do that; leave it out")
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ConfigError(f"--dist-pin-cores {text!r}: expected cores such as 2,3 or 4-7")
        cores.update(range(first, last + 1))
    usable = os.sched_getaffinity(0)
    if not cores <= usable:
        there = ", ".join(map(str, sorted(usable)))
        raise ConfigError(f"--dist-pin-cores {text}: this process may use the cores {there} only")
    return tuple(sorted(cores))


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketConfig:
    """Options of every TCP connection (docs/spec/wire-protocol.md#socket-options, #connecting).

    Args:
        buffer_mb: SO_SNDBUF and SO_RCVBUF in MiB; 0 leaves the system's sizes.
        send_timeout: Seconds without progress after which a send fails.
        recv_timeout: Seconds of silence after which a read fails; None waits for ever.
        bind_host: Source address of outgoing connections.
        bind_interface: Interface of outgoing connections.
        connect_trace: Log every connection attempt.
        cores: What the threads that read and write may use; none chooses all.
    """

    buffer_mb: int = 128
    send_timeout: float = 60.0
    recv_timeout: float | None = None
    bind_host: str | None = None
    bind_interface: str | None = None
    connect_trace: bool = False
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTuning:
    """Queues of a worker (docs/spec/wire-protocol.md#serving, #worker-links).

    Args:
        prefetch_depth: WORK bodies that may wait for the device per connection.
        forward_window: Forwarded requests that may be outstanding per next hop.
        prefetch: False handles one WORK at a time per connection.
        batching: Whether single tokens of different sessions run together.
        decode_profile: Log timings of one-token spans.
    """

    prefetch_depth: int = 2
    forward_window: int = 4
    prefetch: bool = True
    batching: bool = True
    decode_profile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuning:
    """Cutting and overlapping of a prefill (docs/spec/wire-protocol.md#prefill).

    Args:
        chunk: Tokens per chunk; None lets the session choose by what chunks have cost. A
            `ConfigError` is an unusable environment value and fails the prefill, as in ds4.
        window: Chunks in flight; None takes remote hops + 2 within 2 to 8. Or an error, likewise.
        send_depth: Chunks that may wait to be sent.
        pipeline: Whether chunks overlap at all.
        ack_only: Whether chunks before the last ask for an ACK instead of logits.
        prefill_cap: Most tokens that one span may have, before the context limits it.
    """

    chunk: int | ConfigError | None = None
    window: int | ConfigError | None = None
    send_depth: int = 2
    pipeline: bool = True
    ack_only: bool = True
    prefill_cap: int | None = DEFAULT_PREFILL_CAP

    def __post_init__(self) -> None:
        if isinstance(self.window, int) and not 1 <= self.window <= 64:
            raise ConfigError(f"prefill window {self.window}: expected 1 to 64")
        if isinstance(self.chunk, int) and self.chunk < 1:
            raise ConfigError(f"prefill chunk {self.chunk}: expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one process computes, and where.

    Args:
        model: GGUF file, or any shard of a split one.
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "f32" computes in float32 for exactness; "bf16" is fast; "auto" is "bf16".
        act_quant: "cpu" rounds activations as ds4's C engine does on the CPU (DeepSeek V4 only);
            "none" does not; "auto" is "cpu" in float32 on the CPU and "none" otherwise.
        n_ctx: Tokens per session; None takes the smaller of the model's own context and 32768.
        n_slots: Sessions whose caches are held at once.
        kv_type: Type of cached keys and values; "q8_0" is 8-bit integers with a scale for every
            32; "auto" is the type of the precision. Only for models that name no types themselves.
        kv_budget: Bytes that the caches of all sessions may take together; None takes what they
            need, but on the CPU at most half of the memory that is free after loading.
        threads: CPU threads; None takes what the machine has, at most 12.
        prefill_cap: What saved sessions name as the largest chunk of a prompt; None is the context.
        raw_cap: What saved sessions name as the room for raw rows; None is what a GPU node of ds4
            with this context has. Of interest only to C nodes of the same route.
    """

    model: Path
    device: DeviceName = "auto"
    precision: Precision = "auto"
    act_quant: ActQuant = "auto"
    n_ctx: int | None = None
    n_slots: int = 4
    kv_type: KvType = "auto"
    kv_budget: int | None = None
    threads: int | None = None
    prefill_cap: int | None = DEFAULT_PREFILL_CAP
    raw_cap: int | None = None

    def __post_init__(self) -> None:
        if self.n_ctx is not None and self.n_ctx < 1:
            raise ConfigError(f"context {self.n_ctx}: expected at least 1 token")
        if self.n_slots < 1:
            raise ConfigError(f"sessions {self.n_slots}: expected at least 1")
        if self.kv_budget is not None and self.kv_budget < 1:
            raise ConfigError(f"KV budget {self.kv_budget}: expected at least 1 byte")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads {self.threads}: expected at least 1")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device {self.device!r}: expected auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """How a coordinator finds and drives its workers.

    Args:
        layers: First layers, owned by the coordinator itself; None owns none.
        listen: Where workers dial, and HTTP clients too unless `ServerConfig.address` is set.
        route: Workers that the coordinator dials.
        activation_bits: Packing of hidden states on the wire: 32, 16 or 8.
        prefill: Chunks and windows.
        n_sessions: Token timelines that may be open at once.
        batching: Whether single tokens of different sessions run together in the own layers.
        rejoin_timeout: Seconds that a request waits for a lost worker or a replacement.
        result_timeout: Seconds that a request waits for one answer of a stage.
        alive_timeout: Seconds of silence after which another ds4py counts as lost; 0 never. The
            smaller value of both sides holds.
        plain: Speak nothing but ds4's own protocol.
        decode_profile: Log timings of one-token spans.
        trace: File for the times of all spans (Chrome trace events); None keeps none.
    """

    layers: LayerSpec | None = None
    listen: Address | None = None
    route: tuple[RouteEntry, ...] = ()
    activation_bits: int = 32
    prefill: PrefillTuning = field(default_factory=PrefillTuning)
    n_sessions: int = 4
    batching: bool = True
    rejoin_timeout: float = 30.0
    result_timeout: float = 600.0
    alive_timeout: float = DEFAULT_ALIVE_TIMEOUT
    plain: bool = False
    decode_profile: bool = False
    trace: Path | None = None

    def __post_init__(self) -> None:
        _check_alive_timeout(self.alive_timeout)
        if self.activation_bits not in (32, 16, 8):
            raise ConfigError(f"activation bits {self.activation_bits}: expected 32, 16 or 8")
        if self.layers is not None and self.layers.start != 0:
            raise ConfigError(
                f"layers {self.layers}: a coordinator's own layers must start at 0; "
                "give the others to workers"
            )
        if self.n_sessions < 1:
            raise ConfigError(f"sessions {self.n_sessions}: expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker is reached and whom it dials.

    Args:
        layers: The slice.
        listen: Data port; None takes all addresses and a port that the system picks.
        coordinator: Coordinator to dial; None waits to be dialled.
        alive_timeout: As in `CoordinatorConfig`.
        plain: As in `CoordinatorConfig`.
        tuning: Queues.
        trace: As in `CoordinatorConfig`.
    """

    layers: LayerSpec
    listen: Address | None = None
    coordinator: Address | None = None
    alive_timeout: float = DEFAULT_ALIVE_TIMEOUT
    plain: bool = False
    tuning: WorkerTuning = field(default_factory=WorkerTuning)
    trace: Path | None = None

    def __post_init__(self) -> None:
        _check_alive_timeout(self.alive_timeout)
        if self.listen is None and self.coordinator is None:
            raise ConfigError(
                "worker: nobody could reach it; give --dist-listen HOST:PORT to be dialled, "
                "or --dist-coordinator HOST:PORT to dial"
            )
        target = self.coordinator
        if target is not None and (target.is_wildcard or target.port == 0):
            raise ConfigError(f"coordinator {target}: expected a host and port that can be dialled")


def _check_alive_timeout(seconds: float) -> None:
    if seconds and not 0.2 <= seconds <= 86400:
        raise ConfigError(f"alive timeout {seconds:g}: expected 0.2 to 86400 seconds, or 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen (docs/spec/server-and-cli.md#sampling).

    Args:
        temperature: 0 or less takes the most probable token.
        top_k: Candidates kept by rank; 0 or less keeps all, more than 1024 becomes 1024.
        top_p: Cumulative probability kept; outside (0, 1] becomes 1.
        min_p: Probability kept relative to the best token.
        seed: Positive makes the choice reproducible; 0 or less is taken from the clock.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.05
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP front.

    Args:
        address: Own HTTP listener; None serves HTTP on the coordinator's port only.
        max_tokens: Output budget of a request that names none.
        cors: Answer browsers of other origins.
        sampling: Defaults of requests that name no value.
        model_alias: Served model name; None takes the model's own.
        max_body_bytes: Largest request body.
        max_queue: Requests that may wait for a session.
        keepalive_seconds: Pause after which a silent stream sends a comment line.
        request_seconds: Time limit of a request, waiting included; None sets none.
        grace_seconds: Time for running requests to end when the server stops.
        api_key: What clients must name; None lets everybody in.
        think: How much models reason if a request does not say; None leaves it to the model.
        system_in_place: Leave system messages where they stand in a conversation.
        exact_replay: Repeat earlier tool calls in the very words of the model.
        max_tool_ids: Calls that are remembered for that.
        compat_sampling: Ignore the sampling of requests whose model reasons, as ds4 does.
    """

    address: Address | None = None
    max_tokens: int = 393216
    cors: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    model_alias: str | None = None
    max_body_bytes: int = 64 << 20
    max_queue: int = 256
    keepalive_seconds: float = 5.0
    request_seconds: float | None = None
    grace_seconds: float = 0.0
    api_key: str | None = field(default=None, repr=False)
    think: str | None = None
    system_in_place: bool = False
    exact_replay: bool = True
    max_tool_ids: int = 100_000
    compat_sampling: bool = False

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise ConfigError(f"queue of {self.max_queue}: expected 0 or more requests")
        if self.request_seconds is not None and not self.request_seconds > 0:
            raise ConfigError(f"time limit {self.request_seconds}: expected more than 0 seconds")
        if not 0 <= self.grace_seconds <= 86400:
            raise ConfigError(f"grace {self.grace_seconds}: expected 0 to 86400 seconds")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ConfigError("API key: expected ASCII characters, at least one of them visible")
        if self.max_tool_ids < 0:
            raise ConfigError(f"tool memory of {self.max_tool_ids} ids: expected 0 or more")
        if self.max_tokens < 1:
            raise ConfigError(f"max tokens {self.max_tokens}: expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The `DS4_*` variables, read once.

    Args:
        socket: Options of connections.
        worker: Queues of a worker.
        prefill: Cutting of prompts.
        decode_profile: Log timings of one-token spans.
        raw_cap: Room for raw rows that saved sessions name; None takes the rule.
        lock_file: Only one process per file may load a model; None locks nothing.
    """

    socket: SocketConfig
    worker: WorkerTuning
    prefill: PrefillTuning
    decode_profile: bool
    raw_cap: int | None = None
    lock_file: Path | None = None


def read_environment(env: Mapping[str, str] | None = None) -> Environment:
    """Read every variable of wire-protocol.md#environment with its range and invalid-value rule."""
    source = os.environ if env is None else env
    return Environment(
        socket=SocketConfig(
            buffer_mb=_ranged(source, "DS4_DIST_SOCKET_BUFFER_MB", 0, 512, 128),
            send_timeout=_ranged(source, "DS4_DIST_SOCKET_TIMEOUT_SEC", 1, 3600, 60),
            recv_timeout=_ranged(source, "DS4_DIST_SOCKET_RECV_TIMEOUT_SEC", 1, 3600, 0) or None,
            bind_host=source.get("DS4_DIST_CONNECT_BIND_HOST") or None,
            bind_interface=source.get("DS4_DIST_CONNECT_BIND_IF") or None,
            connect_trace="DS4_DIST_CONNECT_TRACE" in source,
        ),
        worker=WorkerTuning(
            prefetch_depth=_ranged(source, "DS4_DIST_WORKER_PREFETCH_DEPTH", 1, 8, 2),
            forward_window=_ranged(source, "DS4_DIST_WORKER_FORWARD_WINDOW", 1, 64, 4),
            prefetch="DS4_DIST_DISABLE_WORKER_PREFETCH" not in source,
            batching="DS4_DIST_DISABLE_BATCHING" not in source,
            decode_profile="DS4_DIST_DECODE_PROFILE" in source,
        ),
        prefill=PrefillTuning(
            chunk=_fatal(source, "DS4_DIST_PREFILL_CHUNK", 1, 2**32 - 1),
            window=_fatal(source, "DS4_DIST_PREFILL_WINDOW", 1, 64),
            send_depth=_ranged(source, "DS4_DIST_PREFILL_SEND_DEPTH", 1, 8, 2),
            pipeline="DS4_DIST_DISABLE_PREFILL_PIPELINE" not in source,
            ack_only="DS4_DIST_DISABLE_PREFILL_ACK_ONLY" not in source,
            prefill_cap=_prefill_cap(source.get("DS4_METAL_PREFILL_CHUNK")),
        ),
        decode_profile="DS4_DIST_DECODE_PROFILE" in source,
        raw_cap=_ranged(source, "DS4_METAL_GRAPH_RAW_CAP", 1, 2**32 - 1, 0) or None,
        lock_file=Path(source["DS4_LOCK_FILE"]) if source.get("DS4_LOCK_FILE") else None,
    )


def _strict_int(text: str) -> int | None:
    return int(text) if len(text) < 40 and _STRICT_INT.fullmatch(text) else None


def _ranged(env: Mapping[str, str], name: str, low: int, high: int, default: int) -> int:
    """Read an integer whose invalid values mean the default."""
    value = _strict_int(env.get(name, ""))
    return value if value is not None and low <= value <= high else default


def _fatal(env: Mapping[str, str], name: str, low: int, high: int) -> int | ConfigError | None:
    """Read an integer whose invalid values must fail the prefill (wire-protocol.md#environment)."""
    text = env.get(name, "")
    if not text:
        return None
    value = _strict_int(text)
    if value is None or not low <= value <= high:
        return ConfigError(f"{name}={text!r}: expected an integer from {low} to {high}")
    return value


def _prefill_cap(text: str | None) -> int | None:
    """Read DS4_METAL_PREFILL_CHUNK; None means "as large as the context".

    See docs/spec/wire-protocol.md#environment.
    """
    if text is None:
        return DEFAULT_PREFILL_CAP
    leading = re.match(r"\s*([+-]?\d{1,18})", text, re.ASCII)
    value = int(leading[1]) if leading else 0
    return value if value > 0 else None
