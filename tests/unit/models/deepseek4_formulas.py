"""The formulas of DeepSeek V4, one function each: deepseek4-model.md#activation-rounding, #forward.

Owns: what the C engine computes on the CPU for one token, in float32 and in its order of summation,
so that little falls to the other side of a rounding step. Refuses to know: weights, layers,
ds4py.models. Invariant: the same bits on every machine; exp, log, sin and cos are float64 results
rounded to float32, because NumPy's own float32 versions depend on the processor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

f32 = np.float32
EPS = f32(1e-6)

# --- float32 as the C engine has it ---------------------------------------------------------------


def in_order(terms: npt.ArrayLike, axis: int = -1) -> F32:
    """Sum along an axis from first to last, each partial sum rounded to float32."""
    return np.add.accumulate(terms, axis=axis, dtype=f32).take(-1, axis=axis)


def rounded(function: Callable[[npt.NDArray], npt.NDArray]) -> Callable[[npt.ArrayLike], F32]:
    """Return a function of float32 whose results are correctly rounded on every machine."""
    return lambda x: function(np.asarray(x, np.float64)).astype(f32)


exp, log1p, sin, cos = rounded(np.exp), rounded(np.log1p), rounded(np.sin), rounded(np.cos)


def half(x: F32) -> F32:
    """Round to IEEE half and back."""
    return x.astype(np.float16).astype(f32)


def sigmoid(x: F32) -> F32:
    """Two-branch form: never the exponential of a positive number."""
    e = exp(-np.abs(x))
    return np.where(x >= 0, f32(1), e) / (f32(1) + e)


def rms_norm(x: F32, weight: F32 | None = None) -> F32:
    """Norm the last axis (deepseek4-model.md#notation); the squares are summed in float64."""
    mean = np.square(x, dtype=np.float64).mean(-1, keepdims=True).astype(f32)
    normed = x * (f32(1) / np.sqrt(mean + EPS))
    return normed if weight is None else normed * weight


# --- rounding steps inside the network ------------------------------------------------------------


def quantize_q8_0(x: F32) -> tuple[F32, F32]:
    """Return scales [blocks, 1] and integers [blocks, 32].

    See docs/spec/deepseek4-model.md#activation-rounding.
    """
    blocks = x.reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / f32(127)
    inverse = np.divide(f32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    return scale, np.rint(blocks * inverse).clip(-128, 127)


def quantize_q8_k(x: F32) -> tuple[F32, F32]:
    """Return scales [blocks, 1] and integers [blocks, 256]; the extreme one is -127.

    See docs/spec/deepseek4-model.md#activation-rounding.
    """
    blocks = x.reshape(-1, 256)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    inverse = np.divide(f32(-127), extreme, out=np.zeros_like(extreme), where=extreme != 0)
    scale = np.divide(f32(1), inverse, out=np.zeros_like(inverse), where=inverse != 0)
    return scale, np.minimum(np.rint(inverse * blocks), f32(127))


E4M3 = np.array(
    [m / 512 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1],
    f32,
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f32)


def nearest(x: F32, codes: F32) -> F32:
    """Round to the nearest of the codes, with the sign of x; ties to the even code number."""
    middles = (codes[1:] + codes[:-1]) / 2
    low = np.searchsorted(middles, np.abs(x), side="left")  # a tie goes to the lower code,
    tied = np.isin(np.abs(x), middles) & (low % 2 == 1)  # unless that one is odd
    return np.copysign(codes[low + tied], x)


def round_blocks(x: F32, width: int, codes: F32, floor: float) -> F32:
    """Round to codes times a power of two that each block of `width` values shares."""
    blocks = x.reshape(-1, width)
    largest = np.maximum(np.abs(blocks).max(1, keepdims=True), f32(floor))
    mantissa, exponent = np.frexp(largest / codes[-1])
    scale = np.ldexp(f32(1), exponent - (mantissa == 0.5))
    return (nearest(blocks / scale, codes) * scale).reshape(x.shape)


def round_kv(row: F32, n_rotated: int) -> F32:
    """Round all but the rotated tail to FP8, without the step to half.

    See docs/spec/deepseek4-model.md#kv-rounding.
    """
    head, tail = np.split(row, [len(row) - n_rotated])
    return np.concatenate([round_blocks(head, 64, E4M3, 1e-4), tail])


def round_index(x: F32) -> F32:
    """Hadamard transform of 128 values, then FP4, without the step to half.

    See docs/spec/deepseek4-model.md#indexer.
    """
    for stride in (1, 2, 4, 8, 16, 32, 64):
        a, b = x.reshape(-1, 2, stride).swapaxes(0, 1)
        x = np.stack([a + b, a - b], axis=1)
    return round_blocks(x.reshape(128) * f32(0.08838834764831845), 32, E2M1, 7.052966104933725e-38)


# --- rotary embedding -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Yarn:
    """Context extension (docs/spec/deepseek4-model.md#rope)."""

    factor: float
    beta_fast: float
    beta_slow: float
    n_ctx_original: float

    def ramp(self, base: float, n_rotated: int) -> F32:
        """Return per pair how much of the plain frequency remains."""

        def pair_of(beta: float) -> float:
            turns = self.n_ctx_original / (2 * math.pi * beta)
            return n_rotated * math.log(turns) / (2 * math.log(base))

        low = max(0, math.floor(pair_of(self.beta_fast)))
        high = min(n_rotated - 1, math.ceil(pair_of(self.beta_slow)))
        pairs = np.arange(n_rotated // 2, dtype=f32)
        return f32(1) - ((pairs - f32(low)) / f32(max(0.001, high - low))).clip(0, 1)


@dataclass(frozen=True)
class Rotary:
    """Rotation of adjacent pairs in the last `n_rotated` values."""

    base: float
    n_rotated: int
    yarn: Yarn | None = None

    def angles(self, position: int) -> F32:
        """Return the angle of each pair by the engine's recurrence over the pairs."""
        step = f32(f32(self.base) ** np.float64(f32(-2) / f32(self.n_rotated)))
        factors = [f32(position), *[step] * (self.n_rotated // 2 - 1)]
        plain = np.multiply.accumulate(factors, dtype=f32)
        if self.yarn is None:
            return plain
        ramp = self.yarn.ramp(self.base, self.n_rotated)
        return plain * f32(1 / self.yarn.factor) * (f32(1) - ramp) + plain * ramp

    def rotate(self, x: F32, position: int, sign: int = 1) -> F32:
        """Return x [..., width] rotated; `sign=-1` rotates back."""
        angles = self.angles(position)
        c, s = cos(angles), sin(angles) * f32(sign)
        head, tail = np.split(x, [x.shape[-1] - self.n_rotated], axis=-1)
        a, b = tail[..., 0::2], tail[..., 1::2]
        pairs = np.stack([a * c - b * s, a * s + b * c], axis=-1)
        return np.concatenate([head, pairs.reshape(tail.shape)], axis=-1)


# --- hyper-connections ----------------------------------------------------------------------------


def hc_split(mix: F32, scale: F32, base: F32, n_rounds: int) -> tuple[F32, F32, F32]:
    """Return pre [4], post [4] and C [4 from, 4 to] of 24 control values.

    See docs/spec/deepseek4-model.md#hyper-connections.
    """
    z = mix * np.repeat(scale, [4, 4, 16]) + base
    pre = f32(1) / (f32(1) + exp(-z[:4])) + EPS
    post = f32(2) / (f32(1) + exp(-z[4:8]))
    c = z[8:].reshape(4, 4)
    c = exp(c - c.max(1, keepdims=True))
    c = c * (f32(1) / in_order(c, 1))[:, None] + EPS
    for number in range(n_rounds):
        if number:
            c = c * (f32(1) / (in_order(c, 1) + EPS))[:, None]
        c = c * (f32(1) / (in_order(c, 0) + EPS))
    return pre, post, c


def hc_collect(streams: F32, weights: F32) -> F32:
    """Return the weighted sum [D] of the streams [S, D]."""
    return in_order(streams * weights[:, None], 0)


def hc_spread(y: F32, streams: F32, post: F32, c: F32) -> F32:
    """Return the streams [S, D] after a sublayer with output y [D]; C's rows are the sources."""
    return in_order([post[:, None] * y, *(c[:, :, None] * streams[:, None])], 0)


# --- attention ------------------------------------------------------------------------------------


def attend(q: F32, rows: F32, sinks: F32) -> F32:
    """Return [NH, HD] for queries [NH, HD] and rows [N, HD], which are keys and values.

    See docs/spec/deepseek4-model.md#attention.
    """
    scores = in_order(rows * q[:, None]) * (f32(1) / np.sqrt(f32(q.shape[1])))
    scores = np.column_stack([sinks, scores])
    weights = exp(scores - scores.max(1, keepdims=True))
    total = in_order(weights[:, 1:, None] * rows, 1)
    return total * (f32(1) / in_order(weights))[:, None]


def largest(scores: F32, count: int) -> npt.NDArray[np.intp]:
    """Return the numbers of the largest scores, best first; the lower number wins a tie."""
    return np.argsort(-scores, kind="stable")[:count]


def index_scores(queries: F32, rows: F32, weights: F32) -> F32:
    """Return how much a token wants each row [N]: queries [IH, ID], rows [N, ID].

    See docs/spec/deepseek4-model.md#indexer.
    """
    dots = in_order(rows * queries[:, None])
    return in_order(np.maximum(dots, f32(0)) * weights[:, None], 0)


@dataclass
class Pool:
    """Compresses `ratio` tokens into one row, and keeps what it was fed and what it made.

    See docs/spec/deepseek4-model.md#compressor.

    Rows of ratio 4 also see the window before their own: of its tokens the first half of the
    channels, of their own tokens the second half.
    """

    ratio: int
    kv: list[F32] = field(default_factory=list)
    scores: list[F32] = field(default_factory=list)
    rows: list[F32] = field(default_factory=list)

    def feed(self, kv: F32, scores: F32) -> F32 | None:
        """Take one token's values and scores; return a pooled row when its window is complete."""
        self.kv.append(kv)
        self.scores.append(scores)
        if len(self.kv) % self.ratio:
            return None
        values, scores = self._candidates(self.kv), self._candidates(self.scores)
        weights = exp(scores - scores.max((0, 1)))
        total = in_order((weights * values).reshape(-1, values.shape[-1]), 0)
        return total / in_order(in_order(weights, 1), 0)

    def _candidates(self, tokens: list[F32]) -> F32:
        """Return what a row can draw on: [ratio, windows, width], the window before first."""
        own = np.stack(tokens[-self.ratio :])
        if self.ratio != 4:
            return own[:, None]
        width = own.shape[1] // 2
        if len(tokens) == 4:
            return own[:, None, width:]
        before = np.stack(tokens[-8:-4])
        return np.stack([before[:, :width], own[:, width:]], axis=1)


# --- experts --------------------------------------------------------------------------------------


def router_probs(logits: F32) -> F32:
    """Return sqrt(softplus) (docs/spec/deepseek4-model.md#feed-forward)."""
    small = np.minimum(logits, f32(20))
    softplus = np.where(small < -20, exp(small), log1p(exp(small)))
    return np.sqrt(np.where(logits > 20, logits, softplus))


def expert_weights(chosen: F32, scale: float) -> F32:
    """Return the weights of the chosen experts from their probabilities."""
    return chosen / np.maximum(in_order(chosen), f32(2**-14)) * f32(scale)


def swiglu(gate: F32, up: F32, limit: float) -> F32:
    """Return silu(gate) * up; the gate is limited from above, up from both sides."""
    gate = np.minimum(gate, f32(limit))
    return gate * sigmoid(gate) * up.clip(-f32(limit), f32(limit))
