"""A node that can answer, opened as the flags of a program say.

Owns: the order of opening, and what the user sees meanwhile. Refuses to know: what it is asked.
Invariant: Ctrl+C while it opens ends as `CancelledError`; the lock is held while it is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from ds4py.cli.flags.shared import DistributedFlags, ModelFlags, local_config
from ds4py.cli.lock import exclusive
from ds4py.cli.signals import stop_signal
from ds4py.cli.terminal import progress_bar
from ds4py.config import Environment
from ds4py.errors import CancelledError, ConfigError

if TYPE_CHECKING:
    from threading import Event

    from ds4py.runtime import Node


@dataclass(frozen=True, slots=True)
class NodeOpener:
    """Opens nodes with one session each.

    Args:
        program: Name in front of what is told.
        model: Flags of the model.
        distributed: Flags of the route.
        environment: What the environment says.
    """

    program: str
    model: ModelFlags
    distributed: DistributedFlags
    environment: Environment

    @contextmanager
    def open(self, n_ctx: int | None = None) -> Iterator[Node]:
        """Load what this process owns and wait for the workers of the rest.

        Args:
            n_ctx: Tokens of a session; None takes what the flags say.

        Raises:
            CancelledError: A signal asked to stop.
            ConfigError: The flags cannot be used.
            Ds4Error: The model cannot be loaded.
        """
        with ExitStack() as stack:
            with stop_signal() as stopping:
                node = self._enter(stack, stopping, n_ctx)
            yield node

    def _enter(self, stack: ExitStack, stopping: Event, n_ctx: int | None) -> Node:
        role, environment = self.distributed.role, self.environment
        model = self.model if n_ctx is None else replace(self.model, ctx=n_ctx)
        engine = model.engine(environment)
        if role == "worker":
            raise ConfigError(f"{self.program} asks questions; start workers with ds4py-server")
        config = local_config(environment, 1)
        if role == "coordinator":
            config = self.distributed.coordinator_config(environment, 1)
        from ds4py.runtime import join_cluster, open_listeners, open_node

        stack.enter_context(exclusive(environment.lock_file))
        listeners = stack.enter_context(open_listeners(config, None, environment.socket))
        with progress_bar("loading", unit="bytes") as loaded:
            node = stack.enter_context(
                open_node(engine, config, environment.socket, whole=role == "none", progress=loaded)
            )
        stack.enter_context(join_cluster(node, listeners))
        ready = node.coordinator.wait_ready(stopping.is_set, self._say_missing)
        if not ready or stopping.is_set():
            raise CancelledError("interrupted before the model was ready")
        return node

    def _say_missing(self, missing: str) -> None:
        click.echo(f"{self.program}: waiting for workers: nobody serves {missing}", err=True)
