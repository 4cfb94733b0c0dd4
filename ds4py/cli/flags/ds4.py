"""Flags of ds4's terminal program that mean something else here, or nothing.

Owns: which of them are translated, which are accepted without effect, which are refused, and the
sentence that says so (docs/spec/server-and-cli.md#cli-modes, #cli-options). Refuses to know: what
our own flags do. Invariant: a command line of ds4 either does what its user expects, or says in one
sentence what it does not do; a flag that would change answers is never ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from ds4py.cli.flags.shared import ModelFlags
from ds4py.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

_MODEL: Final = Path("ds4flash.gguf")  # what ds4 loads if no model is named
_SERVE: Final = "ds4py-cli asks questions; serve with ds4py-server"
_CALIBRATE: Final = "calibration is not built; use ds4 for it"
_CHECKS: Final = "developers' checks of ds4 are not built; ours are in tests/"
_STEER: Final = "directional steering is not built, and without it answers would be others"
_REFUSED: Final = {
    "--server": (False, _SERVE),
    "--imatrix-dataset": (True, _CALIBRATE),
    "--imatrix-out": (True, _CALIBRATE),
    "--imatrix-max-prompts": (True, _CALIBRATE),
    "--imatrix-max-tokens": (True, _CALIBRATE),
    "--head-test": (False, _CHECKS),
    "--first-token-test": (False, _CHECKS),
    "--metal-graph-test": (False, _CHECKS),
    "--metal-graph-full-test": (False, _CHECKS),
    "--metal-graph-prompt-test": (False, _CHECKS),
    "--dir-steering-file": (True, _STEER),
    "--dir-steering-ffn": (True, _STEER),
    "--dir-steering-attn": (True, _STEER),
}
"""Flag -> whether it takes a value, and why it is refused."""


def _refuse(context: click.Context, parameter: click.Parameter, value: object) -> None:
    if value and not context.resilient_parsing:
        flag = parameter.opts[0]
        raise ConfigError(f"{flag}: {_REFUSED[flag][1]}")


def ds4_options(function: F) -> F:
    """Add the flags of `Ds4Flags` and those that are refused."""
    for name, (takes_value, _) in _REFUSED.items():
        function = click.option(
            name, is_flag=not takes_value, expose_value=False, hidden=True, callback=_refuse
        )(function)
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS: Final = (
    click.option("--cuda", "backend", flag_value="cuda", help="As --device cuda."),
    click.option("--cpu", "backend", flag_value="cpu", help="As --device cpu."),
    click.option("--metal", "backend", flag_value="metal", hidden=True),
    click.option(
        "--backend", "backend", type=click.Choice(["cpu", "cuda", "metal"]), help="The same."
    ),
    click.option("--quality", is_flag=True, help="Exact kernels only: as --precision f32."),
    click.option("--chdir", type=click.Path(path_type=Path), help="Folder to read files from."),
    click.option("--power", type=click.IntRange(1, 100), help="Accepted for ds4; has no effect."),
    click.option("--warm-weights", is_flag=True, help="Accepted for ds4; has no effect."),
    click.option("--mtp", metavar="FILE", help="Accepted for ds4; has no effect."),
    click.option("--mtp-draft", type=click.IntRange(1), help="Accepted for ds4; has no effect."),
    click.option(
        "--mtp-margin", type=click.FloatRange(0, 1000), help="Accepted for ds4; has no effect."
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ds4Flags:
    """Values of `ds4_options`."""

    backend: str | None
    quality: bool
    chdir: Path | None
    power: int | None
    warm_weights: bool
    mtp: str | None
    mtp_draft: int | None
    mtp_margin: float | None

    def enter(self) -> None:
        """Go to the folder that was named.

        Raises:
            ConfigError: There is none.
        """
        if self.chdir is None:
            return
        try:
            os.chdir(self.chdir)
        except OSError as e:
            raise ConfigError(f"--chdir {self.chdir}: {e.strerror}") from e

    def without_effect(self) -> list[str]:
        """Return a sentence for each group of flags that does nothing here."""
        told = []
        if self.power is not None and self.power < 100:
            told.append("--power has no effect: the machine runs as it can")
        if self.warm_weights:
            told.append("--warm-weights has no effect: weights are read while they are loaded")
        if self.mtp is not None or self.mtp_draft is not None or self.mtp_margin is not None:
            told.append("--mtp has no effect: tokens come one by one, the answer is the same")
        return told

    def model(self, flags: ModelFlags) -> ModelFlags:
        """Return the flags of the model that mean the same, and ds4's usual model if none is named.

        Raises:
            ConfigError: The backend does not exist here, or contradicts `--device`.
        """
        if self.quality and flags.precision == "auto":
            flags = replace(flags, precision="f32")
        if flags.model is None and _MODEL.exists():
            flags = replace(flags, model=_MODEL)
        if self.backend is None:
            return flags
        if self.backend == "metal":
            raise ConfigError("--metal: there is no Metal backend; use --device cpu or cuda")
        if flags.device != "auto" and flags.device.partition(":")[0] != self.backend:
            raise ConfigError(f"--{self.backend} and --device {flags.device} contradict each other")
        return replace(flags, device=self.backend if flags.device == "auto" else flags.device)
