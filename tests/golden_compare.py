"""How near a DeepSeek V4 is to what the C engine recorded, in numbers.

Owns: teacher forcing, the relative RMS of a difference, driving ds4py's slice of a tiny file.
Refuses to know: what is near enough. Invariant: a half of a layer is judged with recorded inputs
and with caches that recorded inputs filled, so errors do not add up from layer to layer
(docs/spec/deepseek4-model.md#matching).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ds4py.config import ActQuant, Precision
from ds4py.engine.loader import load_slice, read_shape
from ds4py.gguf.file import GgufFile
from ds4py.kernels.cache import Segment
from ds4py.layer_range import LayerRange
from ds4py.models.deepseek4 import Slice
from tests import golden
from tests.unit.models.deepseek4_reference import Reference

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

VARIANTS = ("a", "b")
"""The tiny files."""

N_GREEDY = 32
"""Greedy steps that are recorded after every prompt."""


def relative_rms(got: npt.ArrayLike, expected: npt.ArrayLike) -> F64:
    """Return the RMS of the difference as a part of the RMS of `expected`, along the last axis."""
    exact = np.asarray(expected, np.float64)
    error = np.asarray(got, np.float64) - exact
    return np.sqrt(np.square(error).mean(-1) / np.square(exact).mean(-1))


# --- recordings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """States around every half of every layer, for each position of one prompt.

    Args:
        tokens: The prompt, `T` ids.
        before: States `[L, T, W]` that the layers got.
        between: States after the attention halves.
        after: States after the layers.
    """

    tokens: Sequence[int]
    before: F32
    between: F32
    after: F32


@dataclass(frozen=True)
class Prompt:
    """What the C engine said after a prompt, and how far it is from itself.

    Args:
        name: In `prompts.json`.
        tokens: The prompt.
        logits: After the prompt, `[V]`.
        other_logits: The same from another build of the C engine.
        greedy: The following `N_GREEDY` tokens.
        gaps: By how much the best logit beat the second at each of them.
        noise_rms: RMS change of the logits over the C engine's disturbed runs.
        usual_noise_rms: The median of those runs.
        stable_steps: Leading greedy steps on which the disturbed runs agree.
    """

    name: str
    tokens: Sequence[int]
    logits: F32
    other_logits: F32
    greedy: Sequence[int]
    gaps: F32
    noise_rms: float
    usual_noise_rms: float
    stable_steps: int


@cache
def prompts(variant: str) -> Mapping[str, Prompt]:
    """Return all recorded prompts of a tiny file, shortest first."""
    arrays = golden.load_npz(f"logits_{variant}.npz")
    return {
        name: _prompt(name, entry["ids"], entry["variants"][variant], arrays)
        for name, entry in golden.load_json("prompts.json")["prompts"].items()
    }


def _prompt(name: str, ids: list[int], facts: dict, arrays: dict[str, npt.NDArray]) -> Prompt:
    best = arrays[f"{name}_top5_logprobs"]
    return Prompt(
        name=name,
        tokens=ids,
        logits=arrays[f"{name}_prefill"],
        other_logits=arrays[f"{name}_other_build_prefill"],
        greedy=arrays[f"{name}_greedy"].tolist(),
        gaps=best[:, 0] - best[:, 1],
        noise_rms=facts["noise_rms"],
        usual_noise_rms=facts["noise_rms_median"],
        stable_steps=facts["stable_steps"],
    )


@cache
def recordings(variant: str) -> Mapping[str, Recording]:
    """Return the prompts whose states the C engine recorded at every position."""
    arrays = golden.load_npz(f"hidden_{variant}.npz")
    embed = Reference(golden.path(f"tiny-{variant}.gguf")).embed
    complete = {}
    for name, prompt in prompts(variant).items():
        positions = arrays.get(f"{name}_positions", ())
        if len(positions) == len(prompt.tokens):
            between, after = (arrays[f"{name}_after_{half}"] for half in ("attn", "layer"))
            embedded = np.stack([embed(token) for token in prompt.tokens])
            complete[name] = _recording(prompt.tokens, embedded, between, after)
    return complete


def saved_cache(name: str) -> F32:
    """Return all cache values of a saved session, in the order of the specification's 9.1."""
    content = golden.load_bytes(name)
    header = np.frombuffer(content, "<u4", 13)
    n_tokens, n_layers, n_vocab = (int(header[field]) for field in (7, 8, 11))
    return np.frombuffer(content, "<f4", offset=52 + 4 * n_tokens + 4 * n_vocab + 8 * n_layers)


def reference_run(model: Reference, tokens: Sequence[int]) -> Recording:
    """Return what the reference computes for a prompt by itself, from an empty session."""
    model.reset()
    embedded, between, after = [], [], []
    for position, token in enumerate(tokens):
        streams = model.embed(token)
        embedded.append(streams)
        for layer in range(model.n_layers):
            half = model.attention_half(layer, streams, position)["after_attn_hc"]
            streams = model.feed_forward_half(layer, half, token)["out_hc"]
            between.append(half)
            after.append(streams)
    shape = (len(tokens), model.n_layers, *embedded[0].shape)
    by_layer = (np.reshape(states, shape).swapaxes(0, 1) for states in (between, after))
    return _recording(tokens, np.stack(embedded), *by_layer)


def _recording(tokens: Sequence[int], embedded: F32, between: F32, after: F32) -> Recording:
    before = np.concatenate([embedded[None], after[:-1]])
    flat = (states.reshape(*states.shape[:2], -1) for states in (before, between, after))
    return Recording(tokens, *flat)


# --- teacher forcing ------------------------------------------------------------------------------


class Halves(Protocol):
    """A model with one fresh session, one half of a layer at a time, all positions in order."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""

    def attention(self, layer: int, states: F32) -> F32:
        """Return `[T, W]` after the attention half of states `[T, W]`."""

    def feed_forward(self, layer: int, states: F32, tokens: Sequence[int]) -> F32:
        """Return `[T, W]` after the feed-forward half."""


def forced(model: Halves, recording: Recording) -> Recording:
    """Return what a model makes of each recorded input."""
    layers = range(model.n_layers)
    between = [model.attention(layer, recording.before[layer]) for layer in layers]
    after = [
        model.feed_forward(layer, recording.between[layer], recording.tokens) for layer in layers
    ]
    return Recording(recording.tokens, recording.before, np.stack(between), np.stack(after))


@dataclass(frozen=True)
class Errors:
    """Relative RMS of each half's state, `[L, T]`."""

    attention: F64
    feed_forward: F64


def errors(got: Recording, expected: Recording) -> Errors:
    """Compare states half by half."""
    return Errors(
        relative_rms(got.between, expected.between), relative_rms(got.after, expected.after)
    )


@dataclass(frozen=True)
class Spread:
    """How errors are distributed; a wrong formula shows in the median, a rounding step in p99."""

    median: float
    p99: float
    largest: float

    @classmethod
    def of(cls, parts: Iterable[F64]) -> Spread:
        """Take errors of any shapes."""
        values = np.concatenate([part.reshape(-1) for part in parts])
        return cls(*(float(np.quantile(values, q)) for q in (0.5, 0.99, 1)))


class ForcedReference:
    """The reference with an emptied session, as `Halves`."""

    def __init__(self, model: Reference):
        model.reset()
        self._model = model
        self.n_layers = model.n_layers

    def attention(self, layer: int, states: F32) -> F32:
        """See `Halves`."""
        halves = [
            self._model.attention_half(layer, self._streams(row), position)["after_attn_hc"]
            for position, row in enumerate(states)
        ]
        return np.reshape(halves, states.shape)

    def feed_forward(self, layer: int, states: F32, tokens: Sequence[int]) -> F32:
        """See `Halves`."""
        halves = [
            self._model.feed_forward_half(layer, self._streams(row), token)["out_hc"]
            for row, token in zip(states, tokens, strict=True)
        ]
        return np.reshape(halves, states.shape)

    def _streams(self, row: F32) -> F32:
        return row.reshape(self._model.n_streams, -1)


# --- ds4py ----------------------------------------------------------------------------------------


class TinyModel:
    """ds4py's own computation of a tiny file.

    Args:
        variant: "a" or "b".
        precision: Of products and caches.
        act_quant: Whether activations are rounded.
    """

    def __init__(
        self, variant: str, precision: Precision = "f32", act_quant: ActQuant = "cpu"
    ) -> None:
        with GgufFile.open(golden.path(f"tiny-{variant}.gguf")) as file:
            whole = LayerRange(0, read_shape(file).n_layers - 1, has_output=True)
            cpu = torch.device("cpu")
            loaded = load_slice(file, whole, cpu, precision, n_ctx=512, act_quant=act_quant)
        assert isinstance(loaded.slice, Slice)
        self.slice = loaded.slice

    def session(self, chunk: int | None = None) -> TinySession:
        """Return an empty session that takes its tokens in chunks, None: as they come."""
        return TinySession(self.slice, chunk)

    @torch.inference_mode()
    def feed_each(self, sessions: Sequence[TinySession], tokens: Sequence[int]) -> F32:
        """Evaluate one token of each session in one batch; return their logits `[N, V]`."""
        ids = torch.tensor(tokens)
        segments = [Segment(session.cache, session.length, 1) for session in sessions]
        states = self.slice.forward(self.slice.embed(ids), ids, segments)
        for session in sessions:
            session.length += 1
        return self.slice.logits(states).numpy()

    def greedy(
        self, sessions: Sequence[TinySession], logits: F32, n_tokens: int
    ) -> npt.NDArray[np.int64]:
        """Continue all sessions together with their best tokens: ids `[N, n_tokens]`.

        Args:
            sessions: Each with its prompt evaluated.
            logits: After the prompts, `[N, V]`.
            n_tokens: How many to choose.
        """
        chosen = [logits.argmax(1)]
        while len(chosen) < n_tokens:
            chosen.append(self.feed_each(sessions, chosen[-1].tolist()).argmax(1))
        return np.stack(chosen, axis=1)


class TinySession:
    """One session of a `TinyModel`; as `Halves`, each half of each layer takes one prompt.

    Attributes:
        cache: The session's tensors.
        length: Tokens that `feed` has evaluated.
    """

    def __init__(self, model: Slice, chunk: int | None):
        self._slice = model
        self._chunk = chunk
        self.cache = [torch.zeros(part.shape, dtype=part.dtype) for part in model.cache_layout()]
        self.length = 0
        self.n_layers = len(model.layers)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> F32:
        """Evaluate further tokens; return the logits `[V]` after the last one."""
        states = torch.empty(0)
        for start, end in self._chunks(len(tokens)):
            ids = torch.tensor(tokens[start:end])
            segment = Segment(self.cache, self.length, end - start)
            states = self._slice.forward(self._slice.embed(ids), ids, [segment])
            self.length += end - start
        return self._slice.logits(states[-1:])[0].numpy()

    @torch.inference_mode()
    def attention(self, layer: int, states: F32) -> F32:
        """See `Halves`."""
        own = self._slice.layout.layers(self.cache)[layer]
        parts = []
        for start, end in self._chunks(len(states)):
            step = self._slice.step([Segment(self.cache, start, end - start)])
            rows = torch.tensor(states[start:end])
            parts.append(self._slice.layers[layer].attention_half(rows, step, [own]))
        return torch.cat(parts).numpy()

    @torch.inference_mode()
    def feed_forward(self, layer: int, states: F32, tokens: Sequence[int]) -> F32:
        """See `Halves`."""
        parts = [
            self._slice.layers[layer].feed_forward_half(
                torch.tensor(states[start:end]), torch.tensor(tokens[start:end])
            )
            for start, end in self._chunks(len(states))
        ]
        return torch.cat(parts).numpy()

    def _chunks(self, n_tokens: int) -> Iterable[tuple[int, int]]:
        size = self._chunk or n_tokens
        return ((start, min(start + size, n_tokens)) for start in range(0, n_tokens, size))
