"""The leading words of ds4's payloads, and whether this session can take what they announce.

Owns: the two headers and every check of a single field (docs/spec/deepseek4-model.md#dsv4, #dsvl).
Refuses to know: what follows a header. Invariant: after `check` the number of tokens is smaller
than the session's context and the model is of the same shape.
"""

from __future__ import annotations

from typing import Final

from ds4py.snapshot.binary import DAMAGED, OTHER_MODEL, Header, HeaderForm
from ds4py.snapshot.layout import CacheSizes, Capacities

_SHARED: Final = (
    *("magic", "version", "ctx", "prefill_cap", "raw_cap", "raw_window", "comp_cap", "tokens"),
    *("layers", "head width", "index head width"),
)

WHOLE: Final = HeaderForm("DSV4", 2, (*_SHARED, "vocab", "raw_live"))
"""A session of all layers."""

SHARD: Final = HeaderForm("DSVL", 1, (*_SHARED, "first layer", "last layer", "raw_live"))
"""A session's cache of some layers."""


def shared_words(sizes: CacheSizes, caps: Capacities, n_tokens: int) -> list[int]:
    """Return the words behind the version that both headers begin with."""
    return [
        *(caps.n_ctx, caps.prefill_cap, caps.raw_cap, caps.raw_window, caps.comp_cap, n_tokens),
        *(sizes.n_layers, sizes.width, sizes.index_width),
    ]


def capacities(header: Header) -> Capacities:
    """Return what the writer had room for."""
    words = header.words
    return Capacities(
        n_ctx=words["ctx"],
        prefill_cap=words["prefill_cap"],
        raw_cap=words["raw_cap"],
        raw_window=words["raw_window"],
        comp_cap=words["comp_cap"],
    )


def check(header: Header, sizes: CacheSizes, n_ctx: int) -> int:
    """Check every word that both headers have; `prefill_cap` only informs.

    Args:
        header: As it was read.
        sizes: Of the model that is to continue.
        n_ctx: Tokens that its session can hold.

    Returns:
        The evaluated tokens.

    Raises:
        SnapshotError: The session cannot be continued here.
    """
    own, saved_ctx = Capacities.of(n_ctx, sizes.window), header.words["ctx"]
    n_tokens = header.words["tokens"]
    header.expect("layers", sizes.n_layers, OTHER_MODEL)
    header.expect("head width", sizes.width, OTHER_MODEL)
    header.expect("index head width", sizes.index_width, OTHER_MODEL)
    longer = f"start with a context of at least {max(saved_ctx, n_tokens + 1)} tokens"
    header.within("ctx", 1, n_ctx, longer)
    header.within("tokens", 1, n_ctx - 1, longer)
    header.within("tokens", 1, saved_ctx, DAMAGED)
    header.expect("raw_window", own.raw_window, OTHER_MODEL)
    header.expect("raw_live", min(own.raw_window, n_tokens), DAMAGED)
    header.within("raw_cap", header.words["raw_live"], (1 << 32) - 1, DAMAGED)
    rows = max(sizes.compressed_rows(layer, n_tokens) for layer in range(sizes.n_layers))
    header.within("comp_cap", rows, own.comp_cap, DAMAGED)
    return n_tokens
