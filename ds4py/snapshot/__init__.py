"""Saved sessions as bytes: ds4's `DSV4` and `DSVL` payloads (docs/spec/deepseek4-model.md 9).

Owns: what a payload holds and how it is cut by layers. Refuses to know: files, peers, devices, how
a model computes.

Reading order: `layout` (sizes), `header` (the leading words and their checks), `payload` (values,
reading and writing, join and split).
"""

from ds4py.snapshot.layout import CacheSizes, Capacities
from ds4py.snapshot.payload import (
    Shard,
    Whole,
    join,
    read_dsv4,
    read_dsvl,
    shard_bytes,
    split,
    write_dsv4,
    write_dsvl,
)

__all__ = [
    "CacheSizes",
    "Capacities",
    "Shard",
    "Whole",
    "join",
    "read_dsv4",
    "read_dsvl",
    "shard_bytes",
    "split",
    "write_dsv4",
    "write_dsvl",
]
