"""DeepSeek V4 in plain NumPy, one token after the other: docs/spec/deepseek4-model.md#forward.

Owns: the order in which a token meets the formulas, and what a layer remembers. Refuses to know:
ds4py.models, batches, speed. Invariant: what the C engine computes on the CPU.

`Reference.step` runs the model. `attention_half`, `feed_forward_half` and `head` run a part of it
with any input, and return all that they computed under the names of the `trace_*.npz` recordings.
"""

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ds4py.gguf.file import GgufFile
from tests.unit.models.deepseek4_formulas import (
    EPS,
    F32,
    Pool,
    Rotary,
    Yarn,
    attend,
    expert_weights,
    f32,
    half,
    hc_collect,
    hc_split,
    hc_spread,
    in_order,
    index_scores,
    largest,
    quantize_q8_0,
    quantize_q8_k,
    rms_norm,
    round_index,
    round_kv,
    router_probs,
    sigmoid,
    swiglu,
)

Trace = dict[str, npt.NDArray]

# --- weights --------------------------------------------------------------------------------------


SCALES = {"Q8_0": (0,), "IQ2_XXS": (0,), "Q2_K": (80, 82), "Q4_K": (0, 2)}
"""Where a block of each format has its half-precision scales, in bytes."""


class PlainMatrix:
    """A matrix [out, in] of F16 or F32; the input stays as it is.

    See docs/spec/deepseek4-model.md#activation-forms.
    """

    def __init__(self, weight: F32):
        self._weight = weight

    def __call__(self, x: F32) -> F32:
        return in_order(self._weight * x)


class QuantMatrix:
    """A matrix of quantized blocks, and how the engine multiplies with it.

    See docs/spec/deepseek4-model.md#activation-rounding.

    A block is the sum of one part per scale. Decoded with that scale one and the other zero, a part
    is made of small integers (or eighths), so that its product with a rounded input is exact.

    Args:
        raw: Bytes [out, bytes of a row].
        kind: Tensor type.
        act_quant: Whether the input is rounded.
    """

    def __init__(self, raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, *, act_quant: bool):
        self._width, n_bytes = GGML_QUANT_SIZES[kind]
        self._act_quant = act_quant
        blocks = raw.reshape(len(raw), -1, n_bytes)
        self._parts = [
            (_half_at(blocks, place), _unscaled(blocks, place, kind)) for place in SCALES[kind.name]
        ]

    def __call__(self, x: F32) -> F32:
        scale, values = np.ones((1, 1), f32), x.reshape(-1, self._width)
        if self._act_quant:
            scale, values = (quantize_q8_0 if self._width == 32 else quantize_q8_k)(x)
        terms = [
            weight_scale * scale[:, 0] * np.einsum("obk,bk->ob", part, values).astype(f32)
            for weight_scale, part in self._parts
        ]
        return in_order(sum(terms))


def _half_at(blocks: npt.NDArray[np.uint8], place: int) -> F32:
    return np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0].astype(f32)


def _unscaled(
    blocks: npt.NDArray[np.uint8], place: int, kind: GGMLQuantizationType
) -> npt.NDArray[np.float64]:
    """Decode blocks [out, blocks, width] as if one scale were one and the other zero."""
    blocks = blocks.copy()
    for other in SCALES[kind.name]:
        blocks[..., other : other + 2] = np.array([other == place], np.float16).view(np.uint8)
    return dequantize(blocks, kind).astype(np.float64)


class Weights:
    """A file's tensors, decoded when first asked for; the file stays open."""

    def __init__(self, file: GgufFile, *, act_quant: bool):
        self._file = file
        self._act_quant = act_quant
        self.tensor = cache(self._tensor)
        self.matrix = cache(self._matrix)

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def _tensor(self, name: str) -> npt.NDArray:
        """Return a tensor in row-major shape; halves as float32, quantized rows as bytes."""
        info = self._file.info(name)
        plain = {"F32": np.float32, "F16": np.float16, "I32": np.int32}
        values = np.frombuffer(self._file.raw(name), plain.get(info.type_name, np.uint8))
        values = values.reshape(*info.shape[:-1], -1)
        return values.astype(f32) if values.dtype == np.float16 else values

    def _matrix(self, name: str, part: int = 0, n_parts: int = 1) -> PlainMatrix | QuantMatrix:
        """Return a matrix, or one of equal parts that lie one below the other."""
        whole = self.tensor(name)
        rows = whole.reshape(n_parts, -1, whole.shape[-1])[part]
        kind = GGMLQuantizationType(self._file.info(name).type_id)
        if kind.name not in SCALES:
            return PlainMatrix(rows)
        return QuantMatrix(rows, kind, act_quant=self._act_quant)


# --- the model ------------------------------------------------------------------------------------


class LayerCache:
    """What one layer remembers: every raw row, and the pools."""

    def __init__(self, ratio: int):
        self.raw: list[F32] = []
        self.compressed = Pool(ratio) if ratio else None
        self.index = Pool(ratio) if ratio == 4 else None

    @property
    def n_tokens(self) -> int:
        """Tokens that the layer has seen."""
        return len(self.raw)

    def counts(self, window: int) -> tuple[int, int, int]:
        """Return how many raw, compressed and index rows are in use."""
        compressed, index = (len(p.rows) if p else 0 for p in (self.compressed, self.index))
        return min(len(self.raw), window), compressed, index


class Reference:
    """The whole model with one session.

    Args:
        path: A GGUF file.
        act_quant: Whether products round their input as the C engine does on the CPU.
    """

    def __init__(self, path: Path, *, act_quant: bool = True):
        file = GgufFile.open(path)
        self.keys: Mapping = file.metadata
        self.weights = Weights(file, act_quant=act_quant)
        self.n_layers = int(self.key("block_count"))
        self.ratios = [int(r) for r in self.key("attention.compress_ratios")][: self.n_layers]
        self.n_rotated = int(self.key("rope.dimension_count"))
        self.n_streams = int(self.key("hyper_connection.count"))
        self.window = int(self.key("attention.sliding_window"))
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.caches = [LayerCache(ratio) for ratio in self.ratios]

    def key(self, name: str) -> object:
        """Return a metadata value below `deepseek4.`."""
        return self.keys[f"deepseek4.{name}"]

    @cached_property
    def rotaries(self) -> tuple[Rotary, Rotary]:
        """Rotations of layers without compression and of the others."""
        names = ("factor", "yarn_beta_fast", "yarn_beta_slow", "original_context_length")
        yarn = Yarn(*(float(self.key(f"rope.scaling.{name}")) for name in names))
        compressed = float(self.key("attention.compress_rope_freq_base"))
        return (
            Rotary(float(self.key("rope.freq_base")), self.n_rotated),
            Rotary(compressed, self.n_rotated, yarn),
        )

    def step(self, token: int) -> F32:
        """Run the next token; return the logits [V] after it."""
        streams = self.embed(token)
        for layer, layer_cache in enumerate(self.caches):
            streams = self.attention_half(layer, streams, layer_cache.n_tokens)["after_attn_hc"]
            streams = self.feed_forward_half(layer, streams, token)["out_hc"]
        return self.head(streams)["logits"]

    def embed(self, token: int) -> F32:
        """Return the streams [S, D] that layer 0 starts from."""
        row = self.weights.tensor("token_embd.weight")[token]
        return np.tile(row, (self.n_streams, 1))

    def attention_half(self, layer: int, streams: F32, position: int) -> Trace:
        """Run the first half of a layer at the next position of its cache.

        Args:
            layer: Number of the layer.
            streams: State [S, D] before the layer.
            position: Must be the number of tokens that this layer has seen.

        Returns:
            All intermediate values; `after_attn_hc` [S, D] is the new state.
        """
        own = self.caches[layer]
        assert position == own.n_tokens, f"layer {layer} has seen {own.n_tokens} tokens"
        blk = f"blk.{layer}."
        control, pre, post, c = self._hc(f"{blk}hc_attn", streams)
        x = hc_collect(streams, pre)
        normed = rms_norm(x, self.weights.tensor(f"{blk}attn_norm.weight"))
        trace = control | {"in_hc": streams, "attn_cur": x, "attn_norm": normed}
        trace |= self._project(layer, normed, position)
        own.raw.append(half(trace["kv"]))
        trace |= self._compress(layer, normed)
        rows, selection = self._visible_rows(layer, normed, trace["qr_norm"])
        trace |= selection | {"counts": np.array(own.counts(self.window))}
        trace |= self._attend(layer, trace["q"], rows, position)
        return trace | {"after_attn_hc": hc_spread(trace["attn_out"], streams, post, c)}

    def feed_forward_half(self, layer: int, streams: F32, token: int) -> Trace:
        """Run the second half of a layer.

        Args:
            layer: Number of the layer.
            streams: State [S, D] after the attention half.
            token: Id of the token at this position.

        Returns:
            All intermediate values; `out_hc` [S, D] is the new state.
        """
        blk = f"blk.{layer}."
        control, pre, post, c = self._hc(f"{blk}hc_ffn", streams)
        x = hc_collect(streams, pre)
        normed = rms_norm(x, self.weights.tensor(f"{blk}ffn_norm.weight"))
        trace = control | {"ffn_cur": x, "ffn_norm": normed}
        trace |= self._route(layer, normed, token)
        trace["moe"] = self._experts(layer, normed, trace["experts"], trace["expert_weights"])
        trace["shared"] = self._shared(layer, normed)
        trace["ffn_out"] = trace["moe"] + trace["shared"]
        return trace | {"out_hc": hc_spread(trace["ffn_out"], streams, post, c)}

    def head(self, streams: F32) -> Trace:
        """Return `logits` [V] of the state [S, D] after the last layer, and what led to them."""
        tensor, matrix = self.weights.tensor, self.weights.matrix
        pre = matrix("output_hc_fn.weight")(rms_norm(streams.reshape(-1)))
        z = pre * tensor("output_hc_scale.weight") + tensor("output_hc_base.weight")
        weights = sigmoid(z) + EPS
        x = hc_collect(streams, weights)
        normed = rms_norm(x, tensor("output_norm.weight"))
        return {
            "head_pre": pre,
            "head_weights": weights,
            "head_embd": x,
            "head_norm": normed,
            "logits": matrix("output.weight")(normed),
        }

    def _hc(self, name: str, streams: F32) -> tuple[Trace, F32, F32, F32]:
        """Return the control values as traced, and as pre, post and C."""
        mix = self.weights.matrix(f"{name}_fn.weight")(rms_norm(streams.reshape(-1)))
        scale, base = (self.weights.tensor(f"{name}_{part}.weight") for part in ("scale", "base"))
        pre, post, c = hc_split(
            mix, scale, base, self._size("hyper_connection.sinkhorn_iterations")
        )
        half_name = name.rpartition(".")[2]
        split = np.concatenate([pre, post, c.reshape(-1)])
        return {f"{half_name}_mix": mix, f"{half_name}_split": split}, pre, post, c

    def _project(self, layer: int, x: F32, position: int) -> Trace:
        blk, rotate = f"blk.{layer}.", self._rotary(layer).rotate
        tensor, matrix = self.weights.tensor, self.weights.matrix
        qr = rms_norm(matrix(f"{blk}attn_q_a.weight")(x), tensor(f"{blk}attn_q_a_norm.weight"))
        q = matrix(f"{blk}attn_q_b.weight")(qr).reshape(self._size("attention.head_count"), -1)
        kv = rms_norm(matrix(f"{blk}attn_kv.weight")(x), tensor(f"{blk}attn_kv_a_norm.weight"))
        return {
            "qr_norm": qr,
            "q": rotate(rms_norm(q), position),
            "kv": round_kv(rotate(kv, position), self.n_rotated),
        }

    def _compress(self, layer: int, x: F32) -> Trace:
        """Feed the layer's pools; return the rows that became complete."""
        own, blk = self.caches[layer], f"blk.{layer}."
        trace: Trace = {}
        if own.compressed is not None:
            row = self._pool(own.compressed, f"{blk}attn_compressor", self._rotary(layer), x)
            if row is not None:
                trace["comp_row"] = round_kv(row, self.n_rotated)
                own.compressed.rows.append(half(trace["comp_row"]))
        if own.index is not None:
            row = self._pool(own.index, f"{blk}indexer_compressor", self._rotary(layer), x)
            if row is not None:
                trace["index_row"] = round_index(row)
                own.index.rows.append(half(trace["index_row"]))
        return trace

    def _pool(self, pool: Pool, name: str, rotary: Rotary, x: F32) -> F32 | None:
        """Feed one token to a pool; return a complete row, normed and rotated."""
        phase = len(pool.kv) % pool.ratio
        kv = self.weights.matrix(f"{name}_kv.weight")(x)
        gate = self.weights.matrix(f"{name}_gate.weight")(x)
        row = pool.feed(kv, gate + self.weights.tensor(f"{name}_ape.weight")[phase])
        if row is None:
            return None
        first_position = len(pool.rows) * pool.ratio
        return rotary.rotate(
            rms_norm(row, self.weights.tensor(f"{name}_norm.weight")), first_position
        )

    def _visible_rows(self, layer: int, x: F32, qr: F32) -> tuple[F32, Trace]:
        """Return what the newest token attends to, and how rows of ratio 4 were chosen."""
        own = self.caches[layer]
        rows, trace = own.raw[-self.window :], {}
        if own.index is not None:
            chosen, trace = self._choose(layer, own.index, x, qr)
            rows = rows + [own.compressed.rows[number] for number in chosen]
        elif own.compressed is not None:
            rows = rows + own.compressed.rows
        return np.stack(rows), trace

    def _choose(self, layer: int, index: Pool, x: F32, qr: F32) -> tuple[list[int], Trace]:
        """Return the compressed rows that the indexer lets a token see, in ascending order."""
        n_rows, top_k = len(index.rows), self._size("attention.indexer.top_k")
        if n_rows <= top_k:
            return list(range(n_rows)), {"index_allowed": np.ones(n_rows, np.int8)}
        blk, n_heads = f"blk.{layer}.indexer.", self._size("attention.indexer.head_count")
        queries = self.weights.matrix(f"{blk}attn_q_b.weight")(qr).reshape(n_heads, -1)
        position = self.caches[layer].n_tokens - 1
        queries = np.stack([round_index(q) for q in self._rotary(layer).rotate(queries, position)])
        weights = self.weights.matrix(f"{blk}proj.weight")(x) * (
            f32(1) / np.sqrt(f32(queries.size))
        )
        scores = index_scores(queries, np.stack(index.rows), weights)
        chosen = sorted(largest(scores, top_k).tolist())
        allowed = np.isin(np.arange(n_rows), chosen).astype(np.int8)
        return chosen, {"index_q": queries, "index_scores": scores, "index_allowed": allowed}

    def _attend(self, layer: int, q: F32, rows: F32, position: int) -> Trace:
        """Attend, rotate back, and project groups of heads.

        See docs/spec/deepseek4-model.md#attention, #output-projection.
        """
        blk = f"blk.{layer}."
        heads = attend(q, rows, self.weights.tensor(f"{blk}attn_sinks.weight"))
        heads = self._rotary(layer).rotate(heads, position, sign=-1)
        n_groups = self._size("attention.output_group_count")
        groups = [
            self.weights.matrix(f"{blk}attn_output_a.weight", number, n_groups)(group)
            for number, group in enumerate(heads.reshape(n_groups, -1))
        ]
        low = np.concatenate(groups)
        out = self.weights.matrix(f"{blk}attn_output_b.weight")(low)
        return {"heads": heads, "attn_low": low, "attn_out": out}

    def _route(self, layer: int, x: F32, token: int) -> Trace:
        """Choose the experts of a token: by its id in the first layers, then by probability."""
        blk, bias = f"blk.{layer}.", f"blk.{layer}.exp_probs_b.bias"
        probs = router_probs(self.weights.matrix(f"{blk}ffn_gate_inp.weight")(x))
        if layer < self._size("hash_layer_count"):
            experts = self.weights.tensor(f"{blk}ffn_gate_tid2eid.weight")[token]
        else:
            preference = probs + self.weights.tensor(bias) if bias in self.weights else probs
            experts = largest(preference, self._size("expert_used_count"))
        weights = expert_weights(probs[experts], float(self.key("expert_weights_scale")))
        return {"router_probs": probs, "experts": experts, "expert_weights": weights}

    def _experts(self, layer: int, x: F32, experts: npt.NDArray, weights: F32) -> F32:
        n_experts, outputs = self._size("expert_count"), []
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            gate, up, down = (
                self.weights.matrix(f"blk.{layer}.ffn_{name}_exps.weight", expert, n_experts)
                for name in ("gate", "up", "down")
            )
            hidden = swiglu(gate(x), up(x), self._limit(layer)) * weight
            outputs.append(down(hidden))
        return in_order(outputs, 0)

    def _shared(self, layer: int, x: F32) -> F32:
        matrix, blk = self.weights.matrix, f"blk.{layer}."
        gate, up = (matrix(f"{blk}ffn_{name}_shexp.weight")(x) for name in ("gate", "up"))
        hidden = swiglu(gate, up, self._limit(layer))
        return matrix(f"{blk}ffn_down_shexp.weight")(hidden)

    def _limit(self, layer: int) -> float:
        return float(self.key("swiglu_clamp_exp")[layer])

    def _rotary(self, layer: int) -> Rotary:
        return self.rotaries[self.ratios[layer] != 0]

    def _size(self, name: str) -> int:
        return int(self.key(name))
