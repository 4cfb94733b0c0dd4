"""From an `EngineConfig` to a `LocalRunner`, and the identity of a model.

Owns: `open_runner`, `model_card`. Refuses to know: evaluation, peers. Invariant: two files of the
same architecture and shape have the same model id, whatever their quantization or name.
"""

from __future__ import annotations

import logging
import re
import zlib
from typing import Final

import torch

from ds4py.config import DEFAULT_CTX, EngineConfig
from ds4py.contracts import ModelCard
from ds4py.engine.cache_io import cache_form, capacities
from ds4py.engine.container_limits import ContainerLimits, read_limits
from ds4py.engine.device import choose_device, set_threads
from ds4py.engine.kv_pool import KvPool
from ds4py.engine.loader import LoadProgress, load_slice, read_shape
from ds4py.engine.runner import LocalRunner
from ds4py.engine.selftest import remember_verdicts
from ds4py.errors import ConfigError
from ds4py.gguf.file import GgufFile
from ds4py.gguf.fingerprint import fingerprint
from ds4py.layer_range import LayerSpec, whole_model
from ds4py.models.base import Identity, Shape, Slice
from ds4py.models.registry import load_architecture

log = logging.getLogger(__name__)

_MAX_NAME_BYTES: Final = 127
_TWO_BIT: Final = ("Q2_", "IQ2_", "TQ2_")
_FIRST_EXPERTS: Final = re.compile(r"blk\.\d{1,9}\.ffn_gate_exps\.weight", re.ASCII).fullmatch


def open_runner(
    config: EngineConfig,
    span: LayerSpec | None = None,
    *,
    want_head: bool = False,
    progress: LoadProgress | None = None,
) -> LocalRunner:
    """Load a slice of a model file and take its cache memory.

    Sets the number of torch's threads for the whole process.

    Args:
        config: File, device, precision, context, sessions, threads.
        span: The layers; None takes the whole model with its head.
        want_head: Load the output head too, if the file has it, though the span does not own it.
        progress: Told (bytes loaded, bytes in the slice) after every tensor.

    Raises:
        ConfigError: The device does not exist, the layers are not in the model, the context is
            longer than the model's own, or its caches have a type of their own.
        GgufError: The file cannot be read, or tensors of the slice are missing.
        UnsupportedQuantError: A tensor of the slice cannot be decoded.
        ModelError: The file's model cannot be computed.
        CapacityError: There is not enough memory for the caches, or the budget is too small.
    """
    device = choose_device(config.device)
    limits = read_limits()
    if limits != ContainerLimits():
        log.info("the container limits this process: %s", limits)
    set_threads(config.threads)
    remember_verdicts()
    with GgufFile.open(config.model) as file:
        shape = read_shape(file)
        _check_kv_type(config, shape)
        own = whole_model(shape.n_layers) if span is None else span.resolve(shape.n_layers)
        n_ctx = _context(config, shape)
        loaded = load_slice(
            file,
            own,
            device,
            config.precision,
            n_ctx=n_ctx,
            act_quant=config.act_quant,
            kv_type=config.kv_type,
            want_head=want_head,
            progress=progress,
        )
        card = model_card(file, shape)
    return LocalRunner(
        loaded.slice,
        card,
        own,
        _pool(config, loaded.slice, device, n_ctx),
        device=device,
        n_ctx=n_ctx,
        weight_bytes=loaded.weight_bytes,
        capacities=capacities(config, card, n_ctx),
    )


def read_model(config: EngineConfig) -> tuple[ModelCard, int]:
    """Return a model's identity and the context of its sessions without loading a weight.

    Raises:
        ConfigError: The context is longer than the model's own.
        GgufError: The file cannot be read.
        ModelError: The file's model cannot be computed.
    """
    with GgufFile.open(config.model) as file:
        shape = read_shape(file)
        return model_card(file, shape), _context(config, shape)


def model_card(file: GgufFile, shape: Shape) -> ModelCard:
    """Return the identity of a file's model.

    A model that ds4 knows keeps ds4's id and name. Any other has `0x80000000 | crc32(text)`, where
    text is the shape's canonical form: every constant that the computation depends on, so that
    stages which would compute differently never meet.
    """
    known = shape.identity
    if known is None:
        checksum = zlib.crc32(shape.canonical().encode())
        name = file.metadata.get_str("general.name", "") or shape.architecture
        known = Identity(model_id=0x80000000 | checksum, name=cut_utf8(name, _MAX_NAME_BYTES))
    return ModelCard(
        model_id=known.model_id,
        name=known.name,
        architecture=shape.architecture,
        n_layers=shape.n_layers,
        n_vocab=shape.n_vocab,
        hidden_width=shape.hidden_width,
        n_ctx_train=shape.n_ctx_train,
        quant_bits=_quant_bits(file),
        fingerprint=fingerprint(file),
        cache_form=cache_form(shape.saved_layers),
    )


def cut_utf8(text: str, n_bytes: int) -> str:
    """Cut a text to at most `n_bytes` of UTF-8, between characters; broken bytes become marks."""
    whole = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").encode()
    return whole[:n_bytes].decode("utf-8", "ignore")


def _quant_bits(file: GgufFile) -> int:
    """Return 2 if most bytes of weights are of a 2-bit type, else 4.

    Of a model with experts, those of the first layer decide, as in ds4.
    """
    gate = next((file.tensors[name] for name in file.tensors if _FIRST_EXPERTS(name)), None)
    if gate is not None:
        return 2 if gate.type_name.startswith(_TWO_BIT) else 4
    total = sum(info.n_bytes for info in file.tensors.values())
    two_bit = sum(
        info.n_bytes for info in file.tensors.values() if info.type_name.startswith(_TWO_BIT)
    )
    return 2 if 2 * two_bit > total else 4


def _check_kv_type(config: EngineConfig, shape: Shape) -> None:
    if config.kv_type != "auto" and not load_architecture(shape.architecture).kv_is_free:
        raise ConfigError(
            f"--kv-type {config.kv_type}: caches of {shape.architecture} models have types of "
            "their own; omit it, or use auto"
        )


def _pool(config: EngineConfig, model: Slice, device: torch.device, n_ctx: int) -> KvPool:
    pool = KvPool(
        model.cache_layout(), config.n_slots, device, n_ctx=n_ctx, budget=config.kv_budget
    )
    if pool.slot_bytes > pool.use.budget:
        log.warning(
            "the cache budget of %d MiB is less than one session of %d tokens can take, %d MiB; "
            "see --kv-budget, --kv-type, --ctx",
            pool.use.budget >> 20,
            n_ctx,
            pool.slot_bytes >> 20,
        )
    return pool


def _context(config: EngineConfig, shape: Shape) -> int:
    if config.n_ctx is None:
        return min(shape.n_ctx_train, DEFAULT_CTX)
    if config.n_ctx > shape.n_ctx_train:
        raise ConfigError(
            f"context {config.n_ctx}: the model was trained for {shape.n_ctx_train} tokens; "
            "choose at most that"
        )
    return config.n_ctx
