"""Saved sessions as bytes: ds4's `DSV4` and `DSVL` payloads, and ours for other models.

Owns: what a payload holds and how it is cut by layers; the disk cache of prefixes (`disk_cache`).
Refuses to know: peers, devices, how a model computes.

Reading order: `binary` (words and arrays), `session_state` (a session as a value); ds4's form
(docs/spec/deepseek4-model.md#payloads): `layout` (sizes), `header` (its words and their checks),
`ds4_format` (reading, writing); our form (docs/spec/kv-payload.md): `mha_format`; `formats`
(either). The disk cache: `kvc` (bytes), `kvc_policy` (decisions), `kvc_files` (a folder),
`disk_cache`.
"""

from ds4py.snapshot.ds4_format import (
    Shard,
    read_dsv4,
    read_dsvl,
    shard_bytes,
    write_dsv4,
    write_dsvl,
)
from ds4py.snapshot.formats import (
    SavedShard,
    SavedSizes,
    read_shard,
    read_whole,
    saved_sizes,
    shard_sizes,
    write_shard,
    write_whole,
)
from ds4py.snapshot.layout import CacheSizes, Capacities
from ds4py.snapshot.mha_format import KV_KINDS, KvKind, PlainLayer, PlainShard, PlainSizes
from ds4py.snapshot.session_state import SessionState, join, split

__all__ = [
    "KV_KINDS",
    "CacheSizes",
    "Capacities",
    "KvKind",
    "PlainLayer",
    "PlainShard",
    "PlainSizes",
    "SavedShard",
    "SavedSizes",
    "SessionState",
    "Shard",
    "join",
    "read_dsv4",
    "read_dsvl",
    "read_shard",
    "read_whole",
    "saved_sizes",
    "shard_bytes",
    "shard_sizes",
    "split",
    "write_dsv4",
    "write_dsvl",
    "write_shard",
    "write_whole",
]
