"""ds4py: one big model across the machines people actually have.

    import ds4py

    with ds4py.LLM("M.gguf") as llm:
        for text in llm.generate("Once upon a time", max_tokens=50):
            print(text, end="", flush=True)

Importing this loads nothing else; `LLM` and its relatives load when they are first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ds4py.api.chat import ChatSession
    from ds4py.api.events import Figures, Piece
    from ds4py.api.generation import Generation
    from ds4py.api.llm import LLM
    from ds4py.config import SamplingParams

__version__: Final = "0.2.0"

__all__ = ["LLM", "ChatSession", "Figures", "Generation", "Piece", "SamplingParams"]

_HOMES: Final = {
    "LLM": "ds4py.api.llm",
    "ChatSession": "ds4py.api.chat",
    "Figures": "ds4py.api.events",
    "Generation": "ds4py.api.generation",
    "Piece": "ds4py.api.events",
    "SamplingParams": "ds4py.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ds4py' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
