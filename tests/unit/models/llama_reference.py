"""A llama in plain NumPy float64, one token after the other: slow, short, and independent."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from ds4py.gguf.file import GgufFile
from tools.gguf_writer import TensorSource, WriteValue, save_gguf


def rewritten(
    path: Path,
    *,
    keys: dict[str, WriteValue | None] | None = None,
    add: Sequence[TensorSource] = (),
    drop: Sequence[str] = (),
) -> Path:
    """Copy a file with other metadata (None removes a key) and tensors; return the copy."""
    with GgufFile.open(path) as file:
        metadata: dict = {**file.metadata, **(keys or {})}
        tensors = [
            TensorSource(name, info.type_id, info.dims, bytes(file.raw(name)))
            for name, info in file.tensors.items()
            if name not in {*drop, *(new.name for new in add)}
        ]
    out = path.with_name(f"{path.stem}-variant.gguf")
    kept = {key: value for key, value in metadata.items() if value is not None}
    return save_gguf(out, kept, [*tensors, *add])[0]


class ReferenceLlama:
    """Reads everything, decodes everything, keeps everything."""

    def __init__(self, path: Path):
        with GgufFile.open(path) as file:
            self.keys = dict(file.metadata)
            self.weights = {
                name: dequantize(
                    np.frombuffer(file.raw(name), np.uint8).reshape(*info.shape[:-1], -1)
                    if info.type_name not in {"F32", "F16"}
                    else np.frombuffer(
                        file.raw(name), "<f4" if info.type_name == "F32" else "<f2"
                    ).reshape(info.shape),
                    GGMLQuantizationType(info.type_id),
                )
                .reshape(info.shape)
                .astype(np.float64)
                for name, info in file.tensors.items()
            }
        get = self.keys.get
        self.n_layers = int(get("llama.block_count"))
        self.n_head = int(get("llama.attention.head_count"))
        self.n_kv = int(get("llama.attention.head_count_kv", self.n_head))
        width = int(get("llama.embedding_length"))
        self.d_head = int(get("llama.attention.key_length", width // self.n_head))
        self.eps = float(get("llama.attention.layer_norm_rms_epsilon"))
        self.n_rotated = int(get("llama.rope.dimension_count", self.d_head))

    def angle(self, pair: int, position: int) -> float:
        base = float(self.keys.get("llama.rope.freq_base", 10000.0))
        plain = base ** (-2 * pair / self.n_rotated)
        if "rope_freqs.weight" in self.weights:
            plain /= self.weights["rope_freqs.weight"][pair]
        kind = self.keys.get("llama.rope.scaling.type", "none")
        factor = float(self.keys.get("llama.rope.scaling.factor", 1.0))
        if kind == "none":
            return position * plain
        if kind == "linear":
            return position * plain / factor
        original = self.keys["llama.rope.scaling.original_context_length"]

        def pair_of(turns: float) -> float:
            return (
                self.n_rotated * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            )

        low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), self.n_rotated - 1)
        slow = min(max((pair - low) / max(high - low, 0.001), 0), 1)
        return position * (plain / factor * slow + plain * (1 - slow))

    def stretch(self) -> float:
        if self.keys.get("llama.rope.scaling.type") != "yarn":
            return 1.0
        return 1 + 0.1 * math.log(self.keys["llama.rope.scaling.factor"])

    def rotate(self, head: np.ndarray, position: int) -> np.ndarray:
        out = head.copy()
        for pair in range(self.n_rotated // 2):
            a, b = head[2 * pair], head[2 * pair + 1]
            c, s = math.cos(self.angle(pair, position)), math.sin(self.angle(pair, position))
            out[2 * pair] = (a * c - b * s) * self.stretch()
            out[2 * pair + 1] = (a * s + b * c) * self.stretch()
        return out

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / math.sqrt((x * x).mean() + self.eps) * self.weights[name]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits after the last token."""
        keys: list[list[np.ndarray]] = [[] for _ in range(self.n_layers)]
        values: list[list[np.ndarray]] = [[] for _ in range(self.n_layers)]
        x = np.zeros(0)
        for position, token in enumerate(tokens):
            x = self.weights["token_embd.weight"][token]
            for layer in range(self.n_layers):
                x = self.layer(x, f"blk.{layer}.", position, keys[layer], values[layer])
        x = self.norm(x, "output_norm.weight")
        return self.weights.get("output.weight", self.weights["token_embd.weight"]) @ x

    def layer(self, x, blk, position, keys, values):
        h = self.norm(x, f"{blk}attn_norm.weight")
        q = self.linear(h, f"{blk}attn_q").reshape(self.n_head, self.d_head)
        k = self.linear(h, f"{blk}attn_k").reshape(self.n_kv, self.d_head)
        keys.append(np.stack([self.rotate(head, position) for head in k]))
        values.append(self.linear(h, f"{blk}attn_v").reshape(self.n_kv, self.d_head))
        heads = []
        for number in range(self.n_head):
            group = number // (self.n_head // self.n_kv)
            query = self.rotate(q[number], position)
            scores = np.array([row[group] @ query for row in keys]) / math.sqrt(self.d_head)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            heads.append(sum(w * row[group] for w, row in zip(weights, values, strict=True)))
        x = x + self.linear(np.concatenate(heads), f"{blk}attn_output")
        h = self.norm(x, f"{blk}ffn_norm.weight")
        gate, up = self.linear(h, f"{blk}ffn_gate"), self.linear(h, f"{blk}ffn_up")
        return x + self.linear(gate / (1 + np.exp(-gate)) * up, f"{blk}ffn_down")
