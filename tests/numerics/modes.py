"""Every way to compute that a user can choose, and how far each may be from float32.

Owns: the rows of the matrix of docs/numerics.md, their tolerances, which row a choice of flags is.
Refuses to know: how a row is proved. Invariant: a choice of `--precision`, `--act-quant`,
`--kv-type` on a CPU is a row, or is refused by the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import get_args

import torch

from ds4py.config import ActQuant, EngineConfig, KvType, Precision
from ds4py.engine.device import choose_dtype, rounds_activations
from ds4py.models.registry import KNOWN, load_architecture

CPU = torch.device("cpu")

SIZES = (*range(1, 18), 31, 32, 33, 63, 64, 65, 128)
"""Rows of a batch: all that choose another path somewhere, and their neighbours."""


@dataclass(frozen=True)
class Tolerance:
    """How far results may be from the reference, as relative RMS.

    Args:
        state: Of one row's state after one layer that was given the reference's state before it.
        logits: Of one row's logits after the last layer, given the same.
        free: Median over spans of the logits after all layers, from the tokens on.
        unsure: A row is judged only where the reference chose experts and index rows by more than
            this part of the spread of their scores.
        strays: Part of a batch's judged rows that may be off by more than `state` all the same.
        golden: RMS of the logits after a recorded prompt of the C engine, whose own spread is 3.2.
    """

    state: float
    logits: float
    free: float
    unsure: float = 0.0
    strays: float = 0.0
    golden: float = 0.0


@dataclass(frozen=True)
class Mode:
    """One row of the matrix.

    Args:
        architecture: `general.architecture`.
        precision: "f32" or "bf16".
        rounds: Whether activations are rounded as the C engine does.
        kv: Type of cached keys and values; "own" where the architecture has its own.
        tolerance: Of the row.
    """

    architecture: str
    precision: str
    rounds: bool
    kv: str
    tolerance: Tolerance

    @property
    def name(self) -> str:
        """How tests and the table call it."""
        rounding = "-rounded" if self.rounds else ""
        return f"{self.architecture}-{self.precision}{rounding}-kv-{self.kv}"

    def config(self, **rest: object) -> EngineConfig:
        """Return the flags that choose it."""
        act_quant = "cpu" if self.rounds else "none"
        return EngineConfig(
            device="cpu",
            precision=self.precision,
            act_quant=act_quant if self.architecture == "deepseek4" else "auto",
            kv_type="auto" if self.kv == "own" else self.kv,
            threads=1,
            **rest,
        )


def _deepseek4(precision: str, tolerance: Tolerance, *, rounds: bool) -> Mode:
    return Mode("deepseek4", precision, rounds, "own", tolerance)


def _llama(precision: str, kv: str, tolerance: Tolerance) -> Mode:
    return Mode("llama", precision, False, kv, tolerance)


def _plain(architecture: str, precision: str, tolerance: Tolerance) -> Mode:
    return Mode(architecture, precision, False, precision, tolerance)


QWEN = ("qwen2", "qwen3")
GEMMA = ("gemma2", "gemma3")  # whose layers add more to a state than they find in it
EXPERTS = ("qwen2moe", "qwen3moe")
EXACT_EXPERTS = Tolerance(1e-6, 1e-6, 1e-5, unsure=1e-5)
FAST_EXPERTS = Tolerance(1.2e-2, 8e-3, 4e-2, unsure=2e-2, strays=3e-3)

MODES = (
    _deepseek4(
        "f32",
        Tolerance(6e-3, 1e-2, 3e-2, unsure=2e-3, strays=3e-3, golden=0.6),
        rounds=True,
    ),
    _deepseek4(
        "f32",
        Tolerance(5e-5, 1e-5, 1e-3, unsure=1e-3, strays=3e-3, golden=0.6),
        rounds=False,
    ),
    _deepseek4(
        "bf16",
        Tolerance(1e-2, 8e-3, 4e-2, unsure=1e-1, strays=3e-3, golden=0.6),
        rounds=False,
    ),
    _deepseek4(
        "bf16",
        Tolerance(1.2e-2, 1.5e-2, 6e-2, unsure=1e-1, strays=3e-3, golden=0.6),
        rounds=True,
    ),
    _llama("f32", "f32", Tolerance(1e-6, 1e-6, 2e-6)),
    _llama("f32", "bf16", Tolerance(4e-3, 2e-3, 4e-3)),
    _llama("f32", "f16", Tolerance(5e-4, 2e-4, 6e-4)),
    _llama("f32", "q8_0", Tolerance(1.2e-2, 6e-3, 1e-2)),
    _llama("bf16", "f32", Tolerance(1.2e-2, 8e-3, 1.2e-2)),
    _llama("bf16", "bf16", Tolerance(1.2e-2, 8e-3, 1.2e-2)),
    _llama("bf16", "f16", Tolerance(1.2e-2, 8e-3, 1.2e-2)),
    _llama("bf16", "q8_0", Tolerance(1.8e-2, 8e-3, 1.5e-2)),
    *(_plain(name, "f32", Tolerance(1e-6, 1e-6, 2e-6)) for name in QWEN),
    *(_plain(name, "bf16", Tolerance(1.2e-2, 8e-3, 1.2e-2)) for name in QWEN),
    *(_plain(name, "f32", Tolerance(2e-6, 1e-6, 2e-6)) for name in GEMMA),
    *(_plain(name, "bf16", Tolerance(2e-2, 8e-3, 1.5e-2)) for name in GEMMA),
    *(_plain(name, "f32", EXACT_EXPERTS) for name in EXPERTS),
    *(_plain(name, "bf16", FAST_EXPERTS) for name in EXPERTS),
)


@dataclass(frozen=True)
class Choice:
    """Flags as a user gives them; "auto" is a flag that is left out."""

    architecture: str
    precision: Precision
    act_quant: ActQuant
    kv_type: KvType


def choices() -> Iterator[Choice]:
    """Return every choice that the program takes on a CPU."""
    flags = (get_args(Precision), get_args(ActQuant), get_args(KvType))
    for architecture, precision, act_quant, kv_type in product(KNOWN, *flags):
        if kv_type == "auto" or load_architecture(architecture).kv_is_free:
            yield Choice(architecture, precision, act_quant, kv_type)


def defaults() -> list[Choice]:
    """Return what a user gets who leaves all flags out."""
    fields = EngineConfig.__dataclass_fields__
    found = [fields[name].default for name in ("precision", "act_quant", "kv_type")]
    return [Choice(architecture, *found) for architecture in KNOWN]


def row_of(choice: Choice) -> Mode | None:
    """Return the row that a choice is, by the engine's own rules; None if the matrix lacks it.

    A cache of another type than the products is proved with llama alone: the other plain blocks run
    through the same code (`layers/`), and what they add lies before and behind the cache.
    """
    dtype = choose_dtype(choice.precision)
    precision = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    is_ds4 = choice.architecture == "deepseek4"  # the only one that knows how to round
    rounds = is_ds4 and rounds_activations(choice.act_quant, CPU, dtype)
    has_kv = load_architecture(choice.architecture).kv_is_free
    kv = "own" if not has_kv else precision if choice.kv_type == "auto" else choice.kv_type
    shares = choice.architecture in {*QWEN, *GEMMA, *EXPERTS} and kv != precision
    wanted = ("llama" if shares else choice.architecture, precision, rounds, kv)
    for mode in MODES:
        if (mode.architecture, mode.precision, mode.rounds, mode.kv) == wanted:
            return mode
    return None
