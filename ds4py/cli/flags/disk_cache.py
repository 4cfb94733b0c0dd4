"""Flags of the disk cache, and the options they become.

Owns: ds4's spellings and defaults (docs/spec/server-and-cli.md#disk-cache-options). Refuses to
know: what the cache does with them. Invariant: an unusable value ends the program with status 2,
with or without a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from ds4py.snapshot.disk_cache import DiskCacheOptions

F = TypeVar("F", bound=Callable[..., Any])

_AT_LEAST_ONE: Final = click.IntRange(min=1)
_NOT_NEGATIVE: Final = click.IntRange(min=0)

_OPTIONS: Final[tuple[Callable[[Any], Any], ...]] = (
    click.option(
        "--kv-disk-dir",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        help="Keep conversations in files of this folder, so that they outlive memory and server.",
    ),
    click.option(
        "--kv-disk-space-mb",
        type=_AT_LEAST_ONE,
        default=4096,
        help="Most MiB that these files take [4096].",
    ),
    click.option(
        "--kv-cache-min-tokens",
        type=_AT_LEAST_ONE,
        default=512,
        help="Nothing shorter is saved or loaded [512].",
    ),
    click.option(
        "--kv-cache-cold-max-tokens",
        type=_NOT_NEGATIVE,
        default=30000,
        help="Longest new prompt whose beginning is saved at once, 0 for none [30000].",
    ),
    click.option(
        "--kv-cache-continued-interval-tokens",
        type=_NOT_NEGATIVE,
        default=10000,
        help="Save a growing conversation every so many tokens, 0 for never [10000].",
    ),
    click.option(
        "--kv-cache-boundary-trim-tokens",
        type=_NOT_NEGATIVE,
        default=32,
        help="Tokens cut off the end of a new prompt before its beginning is saved [32].",
    ),
    click.option(
        "--kv-cache-boundary-align-tokens",
        type=_AT_LEAST_ONE,
        default=2048,
        help="Round saved lengths to multiples of this [2048].",
    ),
    click.option(
        "--kv-cache-reject-different-quant",
        is_flag=True,
        help="Load no file of ds4's that was made with another expert quantization.",
    ),
)


def kv_disk_options(function: F) -> F:
    """Add the flags to a command."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDiskFlags:
    """Values of `kv_disk_options`."""

    kv_disk_dir: Path | None
    kv_disk_space_mb: int
    kv_cache_min_tokens: int
    kv_cache_cold_max_tokens: int
    kv_cache_continued_interval_tokens: int
    kv_cache_boundary_trim_tokens: int
    kv_cache_boundary_align_tokens: int
    kv_cache_reject_different_quant: bool

    def options(self) -> DiskCacheOptions | None:
        """Return the cache's options for `kv_disk_dir`; None if no folder is named.

        Raises:
            ConfigError: Values exclude each other.
        """
        from ds4py.snapshot.disk_cache import DiskCacheOptions

        options = DiskCacheOptions(
            space_bytes=self.kv_disk_space_mb << 20,
            min_tokens=self.kv_cache_min_tokens,
            cold_max_tokens=self.kv_cache_cold_max_tokens,
            continued_interval_tokens=self.kv_cache_continued_interval_tokens,
            boundary_trim_tokens=self.kv_cache_boundary_trim_tokens,
            boundary_align_tokens=self.kv_cache_boundary_align_tokens,
            reject_different_quant=self.kv_cache_reject_different_quant,
        )
        return None if self.kv_disk_dir is None else options
