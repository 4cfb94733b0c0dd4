"""A described decoder in plain NumPy float64, one token after the other: slow and independent.

The description of a layer is written here again, and `rules_of` says, from a file's keys alone and
by the families' own sheets, what its layers are: nothing of ds4py's models is used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from ds4py.gguf.file import GgufFile


@dataclass(frozen=True, kw_only=True)
class Rules:
    """One layer."""

    n_head: int
    n_kv: int
    d: int
    n_rotated: int
    base: float = 10000.0
    factor: float = 1.0
    factors: np.ndarray | None = None
    halves: bool = False
    qk_norm: str = "none"
    scale: float = 0.0
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    before: bool = True
    after: bool = False
    residual: float = 1.0
    gelu: bool = False
    n_used: int = 0
    gating: str = "softmax"
    normalise: bool = True
    expert_scale: float = 1.0
    shared: bool = False
    shared_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the layers share."""

    eps: float
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0


def rules_of(keys: Mapping) -> tuple[Model, list[Rules]]:
    """Return the model of a file's metadata."""
    name = keys["general.architecture"]

    def get(key: str, default=None):
        return keys.get(f"{name}.{key}", default)

    width, n_head = int(get("embedding_length")), int(get("attention.head_count"))
    d = int(get("attention.key_length", width // n_head))
    n_layers = int(get("block_count"))
    plain = Rules(
        n_head=n_head,
        n_kv=int(get("attention.head_count_kv", n_head)),
        d=d,
        n_rotated=int(get("rope.dimension_count", d)),
        base=float(get("rope.freq_base", 10000.0)),
        factor=float(get("rope.scaling.factor", 1.0)),
        scale=1 / math.sqrt(d),
    )
    model = Model(eps=float(get("attention.layer_norm_rms_epsilon")))
    n_used = int(get("expert_used_count", 0))
    if name == "llama":
        return model, [replace(plain, n_used=n_used)] * n_layers
    if name == "qwen2":
        return model, [replace(plain, halves=True)] * n_layers
    if name == "qwen2moe":
        moe = replace(
            plain, halves=True, n_used=n_used, normalise=False, shared=True, shared_gate=True
        )
        return model, [moe] * n_layers
    if name in {"qwen3", "qwen3moe"}:
        return model, [replace(plain, halves=True, qk_norm="head", n_used=n_used)] * n_layers
    assert name in {"gemma2", "gemma3"}
    model = replace(
        model,
        embedding_scale=math.sqrt(width),
        logit_cap=float(get("final_logit_softcapping", 0.0)),
    )
    full = replace(
        plain,
        halves=True,
        qk_norm="head" if name == "gemma3" else "none",
        after=True,
        gelu=True,
        cap=float(get("attn_logit_softcapping", 0.0)),
    )
    window = int(get("attention.sliding_window", 0))
    local = replace(full, window=window)
    if name == "gemma3":
        local = replace(local, base=float(get("rope.freq_base_swa", 10000.0)), factor=1.0)
    every = int(get("attention.sliding_window_pattern", 6 if name == "gemma3" else 2))
    return model, [local if window and i % every != every - 1 else full for i in range(n_layers)]


def decoded(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the keys of a file and all its tensors as float64."""
    plain = {"F32": "<f4", "F16": "<f2"}
    with GgufFile.open(path) as file:
        weights = {}
        for name, info in file.tensors.items():
            if info.type_name in plain:
                values = np.frombuffer(file.raw(name), plain[info.type_name])
            else:
                packed = np.frombuffer(file.raw(name), np.uint8).reshape(*info.shape[:-1], -1)
                values = dequantize(packed, GGMLQuantizationType(info.type_id))
            weights[name] = values.reshape(info.shape).astype(np.float64)
        return dict(file.metadata), weights


class ReferenceDecoder:
    """Reads everything, decodes everything, keeps everything."""

    def __init__(self, model: Model, layers: Sequence[Rules], weights: Mapping[str, np.ndarray]):
        self.model, self.layers, self.weights = model, layers, weights
        self.gap = math.inf
        """By how much the last choice of experts was decided, as part of the scores' spread."""

    @classmethod
    def of(cls, path: Path) -> "ReferenceDecoder":
        keys, weights = decoded(path)
        return cls(*rules_of(keys), weights)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def embed(self, token: int) -> np.ndarray:
        return self.weights["token_embd.weight"][token] * self.model.embedding_scale

    def head(self, x: np.ndarray) -> np.ndarray:
        matrix = self.weights.get("output.weight", self.weights["token_embd.weight"])
        logits = matrix @ self.norm(x, "output_norm.weight") * self.model.logit_scale
        cap = self.model.logit_cap
        return cap * np.tanh(logits / cap) if cap else logits

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits after every token, `[N, V]`."""
        caches: list[tuple[list, list]] = [([], []) for _ in self.layers]
        found = []
        for position, token in enumerate(tokens):
            x = self.embed(token)
            for index, (keys, values) in enumerate(caches):
                x = self.layer(x, index, position, keys, values)
            found.append(self.head(x))
        return np.stack(found)

    def layer(self, x, index: int, position: int, keys: list, values: list) -> np.ndarray:
        rules, blk = self.layers[index], f"blk.{index}."
        h = self.norm(x, f"{blk}attn_norm.weight") if rules.before else x
        out = self.attention(h, rules, blk, position, keys, values)
        x = x + rules.residual * self.after(out, f"{blk}post_attention_norm.weight", rules)
        h = self.norm(x, f"{blk}ffn_norm.weight") if rules.before else x
        out = self.experts(h, rules, blk) if rules.n_used else self.gated(h, rules, blk)
        return x + rules.residual * self.after(out, f"{blk}post_ffw_norm.weight", rules)

    def attention(self, h, rules: Rules, blk: str, position: int, keys, values) -> np.ndarray:
        q, k, v = (self.linear(h, f"{blk}attn_{name}") for name in "qkv")
        if rules.qk_norm == "whole":
            q, k = (
                self.norm(q, f"{blk}attn_q_norm.weight"),
                self.norm(k, f"{blk}attn_k_norm.weight"),
            )
        q, k, v = (part.reshape(-1, rules.d) for part in (q, k, v))
        if rules.qk_norm == "head":
            q, k = (
                self.norm(q, f"{blk}attn_q_norm.weight"),
                self.norm(k, f"{blk}attn_k_norm.weight"),
            )
        q, k = rotated(q, position, rules), rotated(k, position, rules)
        keys.append(k)
        values.append(v)
        oldest = max(position - rules.window + 1, 0) if rules.window else 0
        seen_k, seen_v = np.stack(keys[oldest:]), np.stack(values[oldest:])  # [N, G, D]
        heads = []
        for number in range(rules.n_head):
            group = number // (rules.n_head // rules.n_kv)
            scores = seen_k[:, group] @ q[number] * (rules.scale or 1 / math.sqrt(rules.d))
            if rules.cap:
                scores = rules.cap * np.tanh(scores / rules.cap)
            sink = [self.weights[f"{blk}attn_sinks.weight"][number]] if rules.sinks else []
            shares = softmax(np.concatenate((scores, sink)))[: len(scores)]
            heads.append(shares @ seen_v[:, group])
        return self.linear(np.concatenate(heads), f"{blk}attn_output")

    def gated(self, h, rules: Rules, blk: str, suffix: str = "") -> np.ndarray:
        gate, up = self.linear(h, f"{blk}ffn_gate{suffix}"), self.linear(h, f"{blk}ffn_up{suffix}")
        return self.linear(activated(gate, rules) * up, f"{blk}ffn_down{suffix}")

    def experts(self, h, rules: Rules, blk: str) -> np.ndarray:
        logits = self.weights[f"{blk}ffn_gate_inp.weight"] @ h
        scores = {
            "softmax": softmax,
            "sigmoid": lambda values: 1 / (1 + np.exp(-values)),
            "chosen": lambda values: values,
        }[rules.gating](logits)
        ranked = scores + self.weights.get(f"{blk}exp_probs_b.bias", 0)
        order = np.argsort(-ranked, kind="stable")
        chosen = order[: rules.n_used]
        if len(order) > rules.n_used:
            best, next_one = ranked[order[rules.n_used - 1 : rules.n_used + 1]]
            self.gap = float((best - next_one) / (np.ptp(ranked) or 1.0))
        shares = softmax(scores[chosen]) if rules.gating == "chosen" else scores[chosen]
        if rules.normalise:
            shares = shares / max(shares.sum(), 6.1e-5)
        out = np.zeros_like(h)
        for expert, share in zip(chosen, shares * rules.expert_scale, strict=True):
            gate, up, down = (
                self.weights[f"{blk}ffn_{name}_exps.weight"][expert]
                for name in ("gate", "up", "down")
            )
            out = out + share * (down @ (activated(gate @ h, rules) * (up @ h)))
        if rules.shared:
            shared = self.gated(h, rules, blk, "_shexp")
            if rules.shared_gate:
                weigh = self.weights[f"{blk}ffn_gate_inp_shexp.weight"].ravel()
                shared = shared / (1 + math.exp(-(weigh @ h)))
            out = out + shared
        return out

    def after(self, x, name: str, rules: Rules) -> np.ndarray:
        return self.norm(x, name) if rules.after else x

    def norm(self, x, name: str) -> np.ndarray:
        mean = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.model.eps) * self.weights[name]

    def linear(self, x, name: str) -> np.ndarray:
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0)


def rotated(heads: np.ndarray, position: int, rules: Rules) -> np.ndarray:
    """Turn the pairs of heads `[n, D]`."""
    out, half = heads.copy(), rules.n_rotated // 2
    for pair in range(half):
        a, b = (pair, pair + half) if rules.halves else (2 * pair, 2 * pair + 1)
        angle = position / rules.factor * rules.base ** (-2 * pair / rules.n_rotated)
        angle /= 1 if rules.factors is None else rules.factors[pair]
        c, s = math.cos(angle), math.sin(angle)
        out[:, a] = heads[:, a] * c - heads[:, b] * s
        out[:, b] = heads[:, a] * s + heads[:, b] * c
    return out


def softmax(scores: np.ndarray) -> np.ndarray:
    exps = np.exp(scores - scores.max())
    return exps / exps.sum()


def activated(gate: np.ndarray, rules: Rules) -> np.ndarray:
    if rules.gelu:
        inside = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + np.tanh(inside))
    return gate / (1 + np.exp(-gate))
