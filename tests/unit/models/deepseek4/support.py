"""What the tests of the DeepSeek V4 parts share: small shapes, weights by name, the tiny file.

Owns: building the real parts from arrays. Refuses to know: any formula.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ds4py.config import ActQuant
from ds4py.engine.loader import load_slice, read_shape
from ds4py.gguf import kinds
from ds4py.gguf.file import GgufFile
from ds4py.kernels.cache import Cache, CacheTensor, Segment
from ds4py.layer_range import LayerRange
from ds4py.layers.linear import KeepBudget
from ds4py.models.base import DeviceSpec
from ds4py.models.deepseek4 import Shape, Slice
from ds4py.models.deepseek4.linear import Weights
from ds4py.models.deepseek4.shape import KNOWN
from ds4py.models.deepseek4.step import Rotaries, Step
from ds4py.quant.tensor import QuantTensor
from tests.support import golden
from tests.support.toys import packed

CPU = torch.device("cpu")
N_CTX = 512
MODES: tuple[ActQuant, ...] = ("cpu", "none")
"""With and without the rounding of activations."""

Values = np.ndarray | torch.Tensor
_KINDS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.int32): "I32"}


def known_shape(model_id: int, **changes: object) -> Shape:
    """Return one of ds4's shapes (0 Flash, 1 PRO, 2 Tiny), changed."""
    shape = next(shape for shape, identity in KNOWN.items() if identity.model_id == model_id)
    return replace(shape, **changes)


def small_shape(ratio: int = 0, **changes: object) -> Shape:
    """Return a shape of one layer that is not routed by token id."""
    one = {"n_layers": 1, "ratios": (ratio,), "clamps": (10.0,), "n_hash_layers": 0}
    return known_shape(2, **{**one, **changes})


def place(dtype: torch.dtype = torch.float32, *, act_quant: bool = False) -> DeviceSpec:
    return DeviceSpec(
        device=CPU, dtype=dtype, n_ctx=N_CTX, budget=KeepBudget(0), act_quant=act_quant
    )


def tensor(name: str, values: Values, kind: str | None = None) -> QuantTensor:
    """Pack values as a file would hold them; without a kind, by their type."""
    array = np.ascontiguousarray(values)
    if kind is None:
        kind, data = _KINDS[array.dtype], array.tobytes()
    else:
        data = packed(name, array, kind).packed
    return QuantTensor.from_bytes(name, kinds.type_id(kind), array.shape, memoryview(data), CPU)


def weights(
    arrays: Mapping[str, Values],
    *,
    kinds: Mapping[str, str] | None = None,
    where: DeviceSpec | None = None,
) -> Weights:
    """Hand out arrays by name; `kinds` says which of them are packed in blocks."""
    kinds = kinds or {}

    def take(name: str) -> QuantTensor | None:
        return tensor(name, arrays[name], kinds.get(name)) if name in arrays else None

    return Weights(take, where or place())


def normal(*size: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Return the same normally distributed numbers at each call."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale


def step_of(shape: Shape, *segments: tuple[int, int], act_quant: bool = False) -> Step:
    """Return a batch of segments (first position, tokens)."""
    return Step(Rotaries(shape, place(act_quant=act_quant)), segments)


def empty_cache(layout: Sequence[CacheTensor], fill: float = 0.0) -> list[torch.Tensor]:
    return [torch.full(part.shape, fill, dtype=part.dtype) for part in layout]


# --- the tiny file --------------------------------------------------------------------------------


@functools.cache
def tiny(mode: ActQuant, start: int = 0, end: int = 5) -> Slice:
    """Load layers of tiny-a.gguf in float32; the last layer comes with the head."""
    with GgufFile.open(golden.path("tiny-a.gguf")) as file:
        layers = LayerRange(start, end, has_output=end + 1 == read_shape(file).n_layers)
        loaded = load_slice(file, layers, CPU, "f32", n_ctx=N_CTX, act_quant=mode)
    assert isinstance(loaded.slice, Slice)
    return loaded.slice


@functools.cache
def prompt() -> tuple[int, ...]:
    """Return the ids of the longest recorded prompt, 300 tokens."""
    return tuple(golden.load_json("prompts.json")["prompts"]["len300"]["ids"])


class Sessions:
    """Sessions of one slice whose caches lie in the open.

    Args:
        model: Layers from 0 on.
        n_sessions: How many.
        fill: What the caches hold before.
    """

    def __init__(self, model: Slice, n_sessions: int = 1, fill: float = 0.0):
        self.model = model
        self.caches: list[Cache] = [
            empty_cache(model.cache_layout(), fill) for _ in range(n_sessions)
        ]
        self.lengths = [0] * n_sessions

    @torch.inference_mode()
    def feed(self, *spans: Sequence[int]) -> torch.Tensor:
        """Continue every session by some tokens, as one batch; an empty span leaves one out.

        Returns:
            Hidden states `[T, W]` of all tokens.
        """
        segments = [
            Segment(cache, length, len(span))
            for cache, length, span in zip(self.caches, self.lengths, spans, strict=True)
            if span
        ]
        self.lengths = [
            length + len(span) for length, span in zip(self.lengths, spans, strict=True)
        ]
        tokens = torch.tensor([token for span in spans for token in span])
        return self.model.forward(self.model.embed(tokens), tokens, segments)

    @torch.inference_mode()
    def logits(self, *spans: Sequence[int]) -> torch.Tensor:
        """Continue, and return the logits `[sessions, V]` after each session's last token."""
        hidden = self.feed(*spans)
        last = np.cumsum([len(span) for span in spans]) - 1
        return self.model.logits(hidden[last])

    def exported(self, session: int = 0) -> list[torch.Tensor]:
        return self.model.export_cache(self.caches[session], self.lengths[session])
