"""Kernels on a GPU against the ceilings: packed products, attention, codec, transfers.

Owns: sizes, bytes and operations of each call. Refuses to know: models, which kernel a product
takes.
"""

# ruff: noqa: N806 - axis names

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch

from ds4py.engine.activation_codec import pack, unpack
from ds4py.engine.host_staging import staging_for
from ds4py.gguf import kinds
from ds4py.kernels.cache import CacheTensor
from ds4py.layers.attention import attend_many
from ds4py.layers.experts import ExpertGroups, ExpertProduct
from ds4py.layers.linear import PackedLinear
from ds4py.models.deepseek4.hyper import Sinkhorn
from ds4py.quant.formats import format_of
from ds4py.quant.tensor import QuantTensor
from tools.gpu_measure import BF16, Bench

SCALES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "IQ2_XXS": (0,),
}
"""Formats, and where their binary16 scales stand in a block."""

EXPERT_KINDS = ("IQ2_XXS", "Q2_K", "Q4_K", "Q8_0")
SMALL_HALF = (0x00, 0x20)  # 1/128 as binary16
TOLERANCE = 2e-2
CACHE_BYTES = 200 << 20  # more than any GPU's cache holds


def blocks(bench: Bench, kind: str, *shape: int) -> QuantTensor:
    """Return a matrix of random codes with a scale that keeps values small."""
    form = format_of(kinds.type_id(kind), tensor=kind)
    rows = torch.Size(shape[:-1]).numel()
    raw = bench.bytes(rows * shape[-1] // form.block_values, form.block_bytes)
    for offset in SCALES[kind]:
        raw[:, offset : offset + 2] = torch.tensor(SMALL_HALF, dtype=torch.uint8)
    return QuantTensor(kind, form, shape, raw.view(rows, -1))


def products(bench: Bench) -> None:
    """Products with one packed matrix, for one token, for eight, and for a chunk."""
    N, K = bench.size(8192, 64), bench.size(8192, 512)
    for kind in SCALES:
        tensor = blocks(bench, kind, N, K)
        expected = tensor.decode(torch.float32)
        copies = 1 if bench.tiny else max(CACHE_BYTES // tensor.n_bytes, 1)
        packed_bytes = tensor.n_bytes  # the product may take the tensor's memory over
        others = [blocks(bench, kind, N, K) for _ in range(copies - 1)]
        linears = [PackedLinear([one], dtype=BF16) for one in (tensor, *others)]
        for T in (1, 8, bench.size(2048, 32)):
            x = bench.randn(T, K).to(BF16)
            error = relative_error(linears[0](x), x.float() @ expected.t())
            name = f"{kind} {T} x {N} x {K}"
            bench.add("check", name, {"error": error}, ok=error < TOLERANCE)
            took = bench.seconds(*(lambda one=one, x=x: one(x) for one in linears))
            if T <= 8:
                bench.memory_row("decode product", name, packed_bytes, took)
            else:
                bench.product_row("prefill product", name, 2 * T * N * K, took)


def experts(bench: Bench) -> None:
    """Products with one packed matrix per expert, six experts a token."""
    X, used = bench.size(64, 4), bench.size(6, 2)
    N, K = bench.size(2048, 32), bench.size(4096, 256)
    for kind in EXPERT_KINDS:
        tensor = blocks(bench, kind, X, N, K)
        exact = replace(tensor, raw=tensor.raw.clone())  # the product takes the bytes over
        product = ExpertProduct(tensor, BF16)
        for T in (1, 8, bench.size(2048, 16)):
            chosen = bench.randn(T, X).topk(used, 1).indices.flatten()
            groups = ExpertGroups(chosen, X)
            x = bench.randn(T * used, K)
            own = exact.expert(int(groups.experts[0])).decode(torch.float32)
            error = relative_error(product(x, groups)[0], own @ x[0])
            name = f"{kind} {T} tokens, {used} of {X} x {N} x {K}"
            bench.add("check", name, {"error": error}, ok=error < TOLERANCE)
            took = bench.seconds(lambda x=x, groups=groups, product=product: product(x, groups))
            if T <= 8:
                touched = chosen.unique().numel() * tensor.n_bytes / X
                bench.memory_row("decode experts", name, touched, took)
            else:
                bench.product_row("prefill experts", name, 2 * T * used * N * K, took)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def decode_attention(bench: Bench) -> None:
    """One token of one session with much behind it, and of eight with less."""
    if find_spec("triton") is None:
        raise RuntimeError("triton is not installed")
    from ds4py.kernels.cuda.decode_attention import attend_sessions

    groups, per_group, D = bench.size(8, 2), 4, bench.size(128, 16)
    for B, n_keys in ((1, bench.size(1 << 16, 130)), (8, bench.size(1 << 13, 70))):
        form = CacheTensor((2 * groups, n_keys, D), BF16)
        caches = [bench.randn(*form.shape).to(BF16) for _ in range(B)]
        addresses = torch.tensor([kv.data_ptr() for kv in caches], device=bench.device)
        at = torch.full((B,), n_keys - 1, device=bench.device)
        q = bench.randn(B, groups, per_group, D)
        got = attend_sessions(q, addresses, at, form)[0]
        rows = caches[0].float()
        scores = q[0] @ rows[:groups].transpose(1, 2) / D**0.5
        error = relative_error(got, (scores.softmax(2) @ rows[groups:]).flatten())
        name = f"{B} sessions, {n_keys} keys"
        bench.add("check", f"attention, {name}", {"error": error}, ok=error < TOLERANCE)
        took = bench.seconds(lambda: attend_sessions(q, addresses, at, form))  # noqa: B023
        bench.memory_row("decode attention", name, sum(kv.nbytes for kv in caches), took)


def chunk_attention(bench: Bench) -> None:
    """A chunk at the start and behind others: with a mask, and without one."""
    from ds4py.kernels.cuda.chunk_attention import attend_chunk

    T, D = bench.size(2048, 32), bench.size(128, 16)
    groups, per_group = bench.size(8, 2), 4
    for pos0 in (0, 3 * T):
        kv = bench.randn(2 * groups, pos0 + T, D).to(BF16)
        q = bench.randn(T, groups, per_group, D)
        operations = 4 * groups * per_group * D * (T * pos0 + T * T / 2)
        error = relative_error(attend_chunk(q, kv, pos0), attend_many(q, kv, pos0).float())
        bench.add("check", f"chunk attention at {pos0}", {"error": error}, ok=error < TOLERANCE)
        for label, attend in (("mask", attend_many), ("no mask", attend_chunk)):
            took = bench.seconds(lambda attend=attend: attend(q, kv, pos0))  # noqa: B023
            bench.product_row("prefill attention", f"{T} at {pos0}, {label}", operations, took)


def sinkhorn(bench: Bench) -> None:
    """The normalization of DeepSeek V4's hyper-connections, by operations and as one kernel."""
    from ds4py.kernels.cuda.sinkhorn import balanced

    scores = bench.randn(1, 16)
    by_operations = Sinkhorn(4, 20, 1e-6, bench.device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "operations": lambda: by_operations(scores),
        "kernel": lambda: balanced(scores, 4, 20, 1e-6),
    }
    error = relative_error(calls["kernel"](), calls["operations"]())
    bench.add("check", "sinkhorn", {"error": error}, ok=error < 1e-4)
    for label, call in calls.items():
        bench.add("sinkhorn", f"one token, {label}", {"us": 1e6 * bench.seconds(call)})


def codec(bench: Bench) -> None:
    """Narrowing and widening on the device; bytes of the float32 side, once, as bench_codec."""
    T, W = bench.size(4096, 8), bench.size(16384, 64)
    values = bench.randn(T, W)
    for bits in (16, 8):
        codes = pack(values, bits)
        took = bench.seconds(lambda bits=bits: pack(values, bits))
        bench.memory_row("codec", f"pack to {bits} bits", values.nbytes + codes.nbytes, took)
        took = bench.seconds(lambda bits=bits, codes=codes: unpack(codes, bits))
        bench.memory_row("codec", f"unpack {bits} bits", values.nbytes + codes.nbytes, took)


def transfers(bench: Bench) -> None:
    """Activations between host and device: packed bytes per second, each way."""
    T, W = bench.size(1024, 8), bench.size(16384, 64)
    staging, values = staging_for(bench.device), bench.randn(T, W)
    for bits in (32, 16, 8):
        batch = staging.download(values, bits)()
        ways: dict[str, Callable[[], object]] = {
            "down": lambda bits=bits: staging.download(values, bits)(),  # type: ignore[misc]
            "up": lambda batch=batch: staging.upload(batch),  # type: ignore[misc]
        }
        for label, way in ways.items():
            best = float("inf")
            for _ in range(1 if bench.tiny else 5):
                bench.finish()
                start = time.perf_counter()
                way()
                bench.finish()
                best = min(best, time.perf_counter() - start)
            figures = {"us": 1e6 * best, "GB/s": batch.data.nbytes / best / 1e9}
            bench.add("transfer", f"{T} x {W} at {bits} bits, {label}", figures)
