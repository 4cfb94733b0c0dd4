"""Flags that the programs share, and the configs they become.

Owns: spellings (ours and ds4's, docs/spec/wire-protocol.md#command-line), what excludes what.
Refuses to know: what configs are used for. Invariant: every unusable combination ends as a
`ConfigError` before a file or a socket is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from ds4py.config import (
    DEFAULT_ALIVE_TIMEOUT,
    Address,
    CoordinatorConfig,
    EngineConfig,
    Environment,
    KvType,
    PrefillTuning,
    SamplingParams,
    WorkerConfig,
    parse_cores,
    parse_route,
    parse_size,
    read_environment,
)
from ds4py.errors import ConfigError
from ds4py.layer_range import LayerSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound=Callable[..., Any])
RoleFlag = Literal["none", "coordinator", "worker"]

CONTEXT_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _group(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


model_options = _group(
    click.option("-m", "--model", type=click.Path(path_type=Path), help="GGUF file, any shard."),
    click.option("-c", "--ctx", type=int, help="Tokens per session [the model's, at most 32768]."),
    click.option("-t", "--threads", type=int, help="CPU threads [all cores, at most 12]."),
    click.option("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]."),
    click.option(
        "--precision",
        type=click.Choice(["auto", "f32", "bf16"]),
        default="auto",
        help="f32 is exact, bf16 fast [auto: bf16].",
    ),
    click.option(
        "--act-quant",
        type=click.Choice(["auto", "cpu", "none"]),
        default="auto",
        help="DeepSeek V4: cpu rounds activations to 8 bits where ds4's C engine does on the CPU, "
        "none does not [auto: cpu with --device cpu --precision f32, else none].",
    ),
    click.option(
        "--sessions",
        type=int,
        default=4,
        help="Conversations kept in memory at once; they share --kv-budget [4].",
    ),
    click.option(
        "--kv-type",
        type=click.Choice(["auto", "f32", "bf16", "f16", "q8_0"]),
        default="auto",
        help="Type of cached keys and values; DeepSeek V4 has its own [auto: as --precision].",
    ),
    click.option(
        "--kv-budget",
        metavar="SIZE",
        help="Memory for the caches of all conversations, such as 8G [what whole contexts take, on "
        "the CPU at most half of the free memory].",
    ),
)

distributed_options = _group(
    click.option(
        "--dist-role",
        "--role",
        type=click.Choice(["none", "coordinator", "worker"]),
        help="What this process is [none: all layers here].",
    ),
    click.option(
        "--dist-layers",
        "--layers",
        metavar="A-B",
        help="Own layers: A-B (with the output head if B is the last), A:B or A:output as in ds4.",
    ),
    click.option("--dist-listen", metavar="HOST:PORT", help="Where others dial us."),
    click.option("--listen", nargs=2, metavar="HOST PORT", help="The same, ds4's spelling."),
    click.option(
        "--dist-route",
        metavar="HOST:PORT,...",
        help="Coordinator: workers to dial; HOST:PORT=A:B for one that cannot tell its layers.",
    ),
    click.option("--dist-coordinator", metavar="HOST:PORT", help="Worker: coordinator to dial."),
    click.option("--coordinator", nargs=2, metavar="HOST PORT", help="The same, ds4's spelling."),
    click.option(
        "--dist-prefill-chunk",
        type=int,
        help="Coordinator: prompt tokens per chunk; measured by default.",
    ),
    click.option("--dist-prefill-window", type=int, help="Coordinator: chunks in flight, 1-64."),
    click.option(
        "--dist-activation-bits",
        type=click.Choice(["32", "16", "8"]),
        help="Coordinator: bits per value between machines [32].",
    ),
    click.option(
        "--dist-rejoin-timeout",
        type=float,
        help="Coordinator: seconds that a request waits for a lost worker [30].",
    ),
    click.option(
        "--dist-result-timeout",
        type=float,
        help="Coordinator: seconds that a request waits for one answer of a worker [600].",
    ),
    click.option(
        "--dist-alive-timeout",
        type=float,
        help="Seconds of silence after which another ds4py counts as lost, 0 never [10].",
    ),
    click.option(
        "--dist-plain",
        is_flag=True,
        help="Speak nothing but ds4's own protocol; by default peers are asked first.",
    ),
    click.option(
        "--dist-pin-cores",
        metavar="LIST",
        help="Keep threads that only move bytes on these cores, and all others off them: 2,3 or "
        "4-7 (Linux).",
    ),
    click.option(
        "--dist-trace",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Write where the time of each span went, for ui.perfetto.dev.",
    ),
    click.option("--dist-replay-check", is_flag=True, help="Accepted for ds4; has no effect."),
    click.option("--debug", is_flag=True, help="Log every step on stderr."),
)

sampling_options = _group(
    click.option("--temp", "--temperature", "temperature", type=float, help="0 is greedy [1]."),
    click.option("--top-k", type=int, help="Candidates kept; 0 keeps all [0]."),
    click.option("--top-p", type=float, help="Cumulative probability kept [1]."),
    click.option("--min-p", type=float, help="Probability kept relative to the best [0.05]."),
    click.option("--seed", type=int, help="Positive makes the answer reproducible."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Values of `model_options`."""

    model: Path | None
    ctx: int | None
    threads: int | None
    device: str
    precision: Literal["auto", "f32", "bf16"]
    act_quant: Literal["auto", "cpu", "none"]
    sessions: int
    kv_type: KvType
    kv_budget: str | None

    def engine(self, environment: Environment) -> EngineConfig:
        """Return the engine's config.

        Args:
            environment: For the sizes that saved sessions are written with.

        Raises:
            ConfigError: No model is named, or a value is out of range.
        """
        if self.model is None:
            raise ConfigError("no model: give --model FILE.gguf")
        return EngineConfig(
            model=self.model,
            device=self.device,
            precision=self.precision,
            act_quant=self.act_quant,
            n_ctx=self.ctx,
            n_slots=self.sessions,
            kv_type=self.kv_type,
            kv_budget=None if self.kv_budget is None else parse_size(self.kv_budget),
            threads=self.threads,
            prefill_cap=environment.prefill.prefill_cap,
            raw_cap=environment.raw_cap,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedFlags:
    """Values of `distributed_options`."""

    dist_role: RoleFlag | None
    dist_layers: str | None
    dist_listen: str | None
    listen: tuple[str, str] | None
    dist_route: str | None
    dist_coordinator: str | None
    coordinator: tuple[str, str] | None
    dist_prefill_chunk: int | None
    dist_prefill_window: int | None
    dist_activation_bits: str | None
    dist_rejoin_timeout: float | None
    dist_result_timeout: float | None
    dist_alive_timeout: float | None
    dist_plain: bool
    dist_pin_cores: str | None
    dist_trace: Path | None
    dist_replay_check: bool

    @property
    def role(self) -> RoleFlag:
        """What this process is; naming workers to dial makes it a coordinator.

        Raises:
            ConfigError: Distributed values without a role.
        """
        if self.dist_role is not None and self.dist_role != "none":
            return self.dist_role
        if self.dist_route is not None and self.dist_role is None:
            return "coordinator"
        given = [name for name, value in self._values() if value]
        if given:
            raise ConfigError(f"{given[0]} needs a role: add --dist-role coordinator or worker")
        return "none"

    def _values(self) -> list[tuple[str, object]]:
        return [
            ("--dist-layers", self.dist_layers),
            ("--dist-listen", self.dist_listen or self.listen),
            ("--dist-route", self.dist_route),
            ("--dist-coordinator", self.dist_coordinator or self.coordinator),
            ("--dist-alive-timeout", self.dist_alive_timeout is not None),
            ("--dist-plain", self.dist_plain),
            ("--dist-pin-cores", self.dist_pin_cores),
            ("--dist-trace", self.dist_trace),
            *self._coordinator_only(),
        ]

    def _coordinator_only(self) -> list[tuple[str, object]]:
        return [
            ("--dist-prefill-chunk", self.dist_prefill_chunk is not None),
            ("--dist-prefill-window", self.dist_prefill_window is not None),
            ("--dist-activation-bits", self.dist_activation_bits),
            ("--dist-rejoin-timeout", self.dist_rejoin_timeout is not None),
            ("--dist-result-timeout", self.dist_result_timeout is not None),
            ("--dist-replay-check", self.dist_replay_check),
        ]

    def _layers(self) -> LayerSpec | None:
        return None if self.dist_layers is None else LayerSpec.parse(self.dist_layers)

    def worker(self, environment: Environment) -> WorkerConfig:
        """Return a worker's config.

        Raises:
            ConfigError: Something is missing, or belongs to a coordinator.
        """
        for name, value in [("--dist-route", self.dist_route), *self._coordinator_only()]:
            if value:
                raise ConfigError(f"{name} is for coordinators; a worker takes no such option")
        layers = self._layers()
        if layers is None:
            raise ConfigError("a worker needs its layers: add --dist-layers A-B")
        return WorkerConfig(
            layers=layers,
            listen=_address("listen", self.dist_listen, self.listen),
            coordinator=_address("coordinator", self.dist_coordinator, self.coordinator),
            alive_timeout=self._alive_timeout(),
            plain=self.dist_plain,
            tuning=environment.worker,
            trace=self.dist_trace,
        )

    def coordinator_config(self, environment: Environment, n_sessions: int) -> CoordinatorConfig:
        """Return a coordinator's config.

        Raises:
            ConfigError: Something is missing, or belongs to a worker.
        """
        if self.dist_coordinator or self.coordinator:
            raise ConfigError("a coordinator dials no coordinator: drop --dist-coordinator")
        listen = _address("listen", self.dist_listen, self.listen)
        if listen is None and self.dist_route is None:
            raise ConfigError(
                "a coordinator needs workers: add --dist-route HOST:PORT,... to dial them, "
                "or --dist-listen HOST:PORT so that they dial it"
            )
        config = CoordinatorConfig(
            layers=self._layers(),
            listen=listen,
            route=() if self.dist_route is None else parse_route(self.dist_route),
            activation_bits=int(self.dist_activation_bits or 32),
            prefill=self._prefill(environment.prefill),
            n_sessions=n_sessions,
            batching=environment.worker.batching,
            alive_timeout=self._alive_timeout(),
            plain=self.dist_plain,
            decode_profile=environment.decode_profile,
            trace=self.dist_trace,
        )
        if self.dist_rejoin_timeout is not None:
            config = replace(config, rejoin_timeout=self.dist_rejoin_timeout)
        if self.dist_result_timeout is not None:
            config = replace(config, result_timeout=self.dist_result_timeout)
        return config

    def environment(self) -> Environment:
        """Return what the environment says, with the flags of connections over it.

        Raises:
            ConfigError: The cores are none that can be used.
        """
        environment = read_environment()
        if self.dist_pin_cores is None:
            return environment
        cores = parse_cores(self.dist_pin_cores)
        return replace(environment, socket=replace(environment.socket, cores=cores))

    def _alive_timeout(self) -> float:
        given = self.dist_alive_timeout
        return DEFAULT_ALIVE_TIMEOUT if given is None else given

    def _prefill(self, tuning: PrefillTuning) -> PrefillTuning:
        """Flags come before the environment (wire-protocol.md#chunk-size, #pipelined-prefill)."""
        if self.dist_prefill_chunk is not None:
            tuning = replace(tuning, chunk=self.dist_prefill_chunk)
        if self.dist_prefill_window is not None:
            tuning = replace(tuning, window=self.dist_prefill_window)
        return tuning


def take(flags: dict[str, Any], kind: type[DataclassInstance]) -> dict[str, Any]:
    """Move the values that belong to one class of flags out of the whole."""
    return {field.name: flags.pop(field.name) for field in fields(kind)}


def local_config(environment: Environment, n_sessions: int) -> CoordinatorConfig:
    """Return the config of a process that owns every layer."""
    return CoordinatorConfig(
        prefill=environment.prefill,
        n_sessions=n_sessions,
        batching=environment.worker.batching,
        decode_profile=environment.decode_profile,
    )


def sampling(defaults: SamplingParams, **flags: float | None) -> SamplingParams:
    """Return sampling parameters: the given flags over the defaults.

    Raises:
        ConfigError: A value is out of range.
    """
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    ranges = {"temperature": (0, 100), "top_p": (0, 1), "min_p": (0, 1), "seed": (1, 2**63 - 1)}
    for name, (low, high) in ranges.items():
        if name in given and not low <= given[name] <= high:
            flag = "--temp" if name == "temperature" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {given[name]}: expected {low} to {high}")
    return replace(defaults, **given)


def _address(what: str, joined: str | None, pair: tuple[str, str] | None) -> Address | None:
    """Read HOST:PORT or ds4's HOST PORT, one of them."""
    if joined and pair:
        raise ConfigError(f"--dist-{what} and --{what} say the same: give one of them")
    if pair:
        host, port = pair
        return Address.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return Address.parse(joined) if joined else None
