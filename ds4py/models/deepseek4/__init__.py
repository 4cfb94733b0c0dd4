"""DeepSeek V4, ds4's own architecture (docs/spec/deepseek4-model.md).

Owns: the public names. Refuses to know: files, sessions, sockets.

Reading order: `shape` (sizes and tensor names), `slice` (a layer's two halves), then one module
per idea: `hyper`, `attention` with `compressor`, `indexer`, `attend` and `cache`, `moe`; the number
formats are in `rounding` and `rotary`.

Axis glossary, besides that of `models`: `S` hyper-connection streams, `HD` head width, `R` rotary
dimensions, `X` experts, `U` experts used per token, `r` compression ratio.
"""

from typing import Final

from ds4py.models.base import Architecture
from ds4py.models.deepseek4.shape import Shape
from ds4py.models.deepseek4.slice import Slice

__all__ = ["ARCHITECTURE", "Shape", "Slice"]

ARCHITECTURE: Final = Architecture(Shape.from_metadata, Slice.load, kv_is_free=False)
