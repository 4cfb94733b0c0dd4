"""Where the real models for tests lie: `models/` of the project, filled by `tools/get_models`."""

from pathlib import Path

MODELS = Path(__file__).parents[2] / "models"


def _path(name: str) -> Path:
    path = MODELS / name
    assert path.exists(), f"{path} is missing: run ./tools/test, or ./tools/get_models once"
    return path


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1: llama architecture, BPE."""
    return _path("SmolLM2-135M-Instruct.Q4_1.gguf")


def gemma3_path() -> Path:
    """gemma-3-270m Q4_K_M: SPM, a 262k-token vocabulary, K-quants."""
    return _path("gemma-3-270m-q4_k_m.gguf")
