"""What a section of `./tools/bench` is given, and the models it measures.

Owns: `Bench`, where model files lie. Refuses to know: what is measured. Invariant: a file or a
baseline that is missing makes a finding that says how to get it, never an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.benchmarks.llama import Llama

SMOLLM2: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3: Final = "gemma-3-270m-q4_k_m.gguf"
LLAMA_1B_Q4_K: Final = "toy-llama-1b-q4_k.gguf"
LLAMA_1B_Q8_0: Final = "toy-llama-1b-q8_0.gguf"

_HOW: Final = {
    SMOLLM2: "tools/get_models.py smollm2",
    GEMMA3: "tools/get_models.py gemma3",
    LLAMA_1B_Q4_K: f"tools/make_toy_gguf --preset llama-1b --mix Q4_K -o models/{LLAMA_1B_Q4_K}",
    LLAMA_1B_Q8_0: f"tools/make_toy_gguf --preset llama-1b --mix Q8_0 -o models/{LLAMA_1B_Q8_0}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every section needs.

    Args:
        models: Folder of the model files.
        rounds: Turns of whatever is measured in turns.
        chunk: Prompt tokens per chunk of a pipeline, and of what it is compared with.
        cores: Cores that this process and its children may use.
        llama: llama.cpp's Python package; None if there is none.
        llama_bench: llama.cpp's benchmark program, taken for one process instead.
        step: Told what is measured next.
    """

    models: Path
    rounds: int
    chunk: int
    cores: int
    llama: Llama | None
    llama_bench: Path | None
    step: Callable[[str], None]

    def model(self, name: str) -> Path:
        """Return the path of a model file, whether or not it is there."""
        return self.models / name

    def missing(self, name: str) -> str:
        """Return why a model cannot be measured; empty if it can."""
        if self.model(name).exists():
            return ""
        return f"{self.model(name)} is missing; {_HOW[name]} makes it"
