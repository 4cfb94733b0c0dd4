"""`ds4py-server`: one process of a route, with or without HTTP.

Owns: the flags of the server and the order of starting and stopping. Refuses to know: how anything
works. Invariant: `--help` imports nothing heavy; a clean stop exits with 0.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from ds4py import __version__
from ds4py.cli import exits
from ds4py.cli.flags.disk_cache import KvDiskFlags, kv_disk_options
from ds4py.cli.flags.shared import (
    CONTEXT_SETTINGS,
    DistributedFlags,
    ModelFlags,
    distributed_options,
    local_config,
    model_options,
    sampling,
    sampling_options,
    take,
)
from ds4py.cli.lock import exclusive
from ds4py.cli.signals import stop_signal
from ds4py.cli.terminal import progress_bar, start_logging
from ds4py.config import (
    DEFAULT_PORT,
    Address,
    CoordinatorConfig,
    EngineConfig,
    Environment,
    SamplingParams,
    ServerConfig,
)
from ds4py.errors import ConfigError

if TYPE_CHECKING:
    from ds4py.snapshot.disk_cache import DiskCacheOptions

log = logging.getLogger("ds4py.server.main")

PROGRAM: Final = "ds4py-server"
_LOOPBACK: Final = "127.0.0.1"
_MAX_KEY_BYTES: Final = 4096
_OPEN_DOOR: Final = (
    "ANYBODY who reaches %s can use this server: give --api-key-file, or listen on 127.0.0.1 only"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpFlags:
    """Flags of the HTTP front."""

    http: str | None
    host: str | None
    port: int | None
    cors: bool
    tokens: int
    served_name: str | None
    api_key: str | None
    api_key_file: Path | None
    max_queue: int
    request_timeout: float | None
    grace: float
    nothink: bool
    system_in_place: bool
    compat_sampling: bool
    exact_replay: bool
    tool_memory_max_ids: int

    def config(self, shared: bool, defaults: SamplingParams) -> ServerConfig:
        """Return the HTTP config.

        Args:
            shared: A coordinator's port is there to be shared.
            defaults: Sampling of requests that name no value.

        Raises:
            ConfigError: Two ways of naming the address, or a bad one.
        """
        return ServerConfig(
            address=self._address(shared),
            max_tokens=self.tokens,
            cors=self.cors,
            sampling=defaults,
            model_alias=self.served_name,
            api_key=self._key(),
            max_queue=self.max_queue,
            request_seconds=self.request_timeout,
            grace_seconds=self.grace,
            think="none" if self.nothink else None,
            system_in_place=self.system_in_place,
            compat_sampling=self.compat_sampling,
            exact_replay=self.exact_replay,
            max_tool_ids=self.tool_memory_max_ids,
        )

    def _key(self) -> str | None:
        """Return the API key; from a file, so that no list of processes shows it."""
        if self.api_key_file is None:
            return self.api_key
        if self.api_key is not None:
            raise ConfigError("--api-key and --api-key-file say the same: give one of them")
        try:
            with self.api_key_file.open("rb") as file:
                return file.read(_MAX_KEY_BYTES).decode("utf-8", "replace").strip()
        except OSError as e:
            raise ConfigError(f"--api-key-file {self.api_key_file}: {e.strerror}") from e

    def _address(self, shared: bool) -> Address | None:
        if self.http and (self.host or self.port is not None):
            raise ConfigError("--http and --host/--port say the same: give one of them")
        if self.http:
            text = self.http if ":" in self.http else f":{self.http}"
            return Address.parse(f"{_LOOPBACK}{text}" if text.startswith(":") else text)
        if self.host or self.port is not None:
            return Address(self.host or _LOOPBACK, DEFAULT_PORT if self.port is None else self.port)
        return None if shared else Address(_LOOPBACK, DEFAULT_PORT)


@click.command(context_settings=CONTEXT_SETTINGS)
@model_options
@distributed_options
@click.option("--http", metavar="HOST:PORT", help="HTTP on an address of its own [127.0.0.1].")
@click.option("--host", help="The same, ds4's spelling: host.")
@click.option("--port", type=int, help="The same, ds4's spelling: port [8000].")
@click.option("--cors", is_flag=True, help="Let browsers of other origins in.")
@click.option("-n", "--tokens", type=int, default=393216, help="Output budget of a request.")
@click.option(
    "--served-name",
    "--served-model-name",
    help="Model name that clients see [the model's own].",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="DS4PY_API_KEY",
    help="Let in only clients that name this key; also DS4PY_API_KEY.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="The same, from a file that others cannot read.",
)
@click.option(
    "--max-queue",
    type=int,
    default=256,
    show_default=True,
    help="Requests that may wait for a session; more are refused with status 429.",
)
@click.option(
    "--request-timeout",
    type=float,
    metavar="SECONDS",
    help="Time limit of a request, waiting included [none].",
)
@click.option(
    "--grace",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="Time for running answers to end when the server is stopped [0: they break off].",
)
@click.option("--nothink", is_flag=True, help="No reasoning unless a request asks for it.")
@click.option(
    "--system-in-place", is_flag=True, help="Keep system messages at their original position."
)
@click.option(
    "--ds4-compat-sampling",
    "compat_sampling",
    is_flag=True,
    help="Ignore a request's sampling while its model reasons, as ds4 does.",
)
@click.option(
    "--disable-exact-dsml-tool-replay",
    "exact_replay",
    flag_value=False,
    default=True,
    help="Re-render previous tool calls instead of replaying the model's exact text.",
)
@click.option(
    "--tool-memory-max-ids",
    type=int,
    default=100_000,
    show_default=True,
    help="Tool calls whose words are remembered.",
)
@kv_disk_options
@sampling_options
@click.version_option(__version__, prog_name=PROGRAM)
def server(**flags: Any) -> None:
    """Serve a model, or a slice of one, to clients and to other machines.

    \b
    One machine:
      ds4py-server -m M.gguf
    Three machines, one port each; start them in any order:
      ds4py-server --dist-role worker --dist-listen 0.0.0.0:8001 -m M.gguf --dist-layers 0-12
      ds4py-server --dist-role worker --dist-listen 0.0.0.0:8002 -m M.gguf --dist-layers 13-24
      ds4py-server --dist-role coordinator --dist-listen 0.0.0.0:8000 -m M.gguf \\
        --dist-route worker1:8001,worker2:8002
    """  # noqa: D301 - click wants the backspace character itself
    start_logging(PROGRAM, level=logging.DEBUG if flags.pop("debug") else logging.INFO)
    model = ModelFlags(**take(flags, ModelFlags))
    distributed = DistributedFlags(**take(flags, DistributedFlags))
    http = HttpFlags(**take(flags, HttpFlags))
    kept = KvDiskFlags(**take(flags, KvDiskFlags))
    disk = (kept.kv_disk_dir, kept.options())
    environment = distributed.environment()
    defaults = sampling(SamplingParams(), **flags)
    engine = model.engine(environment)
    if distributed.role == "worker":
        _run_worker(engine, distributed, environment)
        return
    if distributed.role == "coordinator":
        config = distributed.coordinator_config(environment, model.sessions)
    else:
        config = local_config(environment, model.sessions)
    whole = distributed.role == "none"
    front = http.config(config.listen is not None, defaults)
    _run_coordinator(engine, config, front, environment, disk=disk, whole=whole)


def _run_worker(engine: EngineConfig, flags: DistributedFlags, environment: Environment) -> None:
    config = flags.worker(environment)
    from ds4py.runtime import open_worker

    with stop_signal() as stopping, ExitStack() as stack:
        stack.enter_context(exclusive(environment.lock_file))
        with progress_bar("loading", unit="bytes") as progress:
            worker = stack.enter_context(
                open_worker(engine, config, environment.socket, progress=progress)
            )
        log.info("ready: worker on %s", worker.address)
        stopping.wait()
        log.info("stopping")


def _run_coordinator(
    engine: EngineConfig,
    config: CoordinatorConfig,
    front: ServerConfig,
    environment: Environment,
    *,
    disk: tuple[Path | None, DiskCacheOptions | None],
    whole: bool,
) -> None:
    from ds4py.runtime import open_disk_cache, open_listeners, open_node, serve_http

    with stop_signal() as stopping, ExitStack() as stack:
        stack.enter_context(exclusive(environment.lock_file))
        listeners = stack.enter_context(open_listeners(config, front, environment.socket))
        with progress_bar("loading", unit="bytes") as progress:
            node = stack.enter_context(
                open_node(engine, config, environment.socket, whole=whole, progress=progress)
            )
        folder, options = disk
        cache = None
        if folder is not None and options is not None:
            cache = open_disk_cache(folder, options, node, engine.kv_type)
        stack.enter_context(serve_http(node, listeners, front, disk=cache))
        for address in listeners.http_addresses:
            log.info("HTTP on %s", address)
            if front.api_key is None and not address.is_loopback:
                log.warning(_OPEN_DOOR, address)
        if node.coordinator.wait_ready(stopping.is_set, _say_missing):
            log.info("ready: the whole model is reachable")
            stopping.wait()
        log.info("stopping")


def _say_missing(missing: str) -> None:
    log.info("waiting for workers: nobody serves %s", missing)


def main() -> NoReturn:
    """Run `ds4py-server`."""
    exits.run(server, PROGRAM)
