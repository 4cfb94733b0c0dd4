"""GGUF files <-> values: header, metadata, tensor directory, and the raw bytes of tensors.

Owns: everything that is known about a file without decoding a weight. Refuses to know: devices,
quantized values, what a tensor is for. Invariant: nothing that a file claims is believed before it
was checked against the bytes that are there.

Reading order: `kinds` (ids and sizes), `parse` (bytes -> values), `metadata` (typed getters),
`file` (maps and shards), `summary` (what a person wants to know), `write` (small files).
"""
