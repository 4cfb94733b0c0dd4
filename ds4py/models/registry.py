"""Which module computes which architecture.

Owns: the table from `general.architecture` to modules. Refuses to know: what is inside them.
Invariant: a module is imported only when a model needs it.
"""

from __future__ import annotations

import importlib
from typing import Final

from ds4py.errors import ModelError
from ds4py.models.base import Architecture

_MODULES: Final = {
    "deepseek4": "ds4py.models.deepseek4",
    "gemma2": "ds4py.models.gemma",
    "gemma3": "ds4py.models.gemma",
    "llama": "ds4py.models.llama",
    "qwen2": "ds4py.models.qwen",
    "qwen2moe": "ds4py.models.qwen",
    "qwen3": "ds4py.models.qwen",
    "qwen3moe": "ds4py.models.qwen",
}

KNOWN: Final = tuple(_MODULES)
"""Names of the architectures that can be computed."""


def load_architecture(name: str) -> Architecture:
    """Return an architecture by its `general.architecture`.

    Raises:
        ModelError: ds4py does not know it; lists those that it knows.
    """
    if name not in _MODULES:
        raise ModelError(
            "metadata key general.architecture",
            got=repr(name),
            expected=f"one of the architectures that ds4py computes: {', '.join(KNOWN)}",
        )
    found: Architecture = importlib.import_module(_MODULES[name]).ARCHITECTURE
    return found
