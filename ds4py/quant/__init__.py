"""Packed weights: GGML block formats, their decoders, and products with them.

Owns: what the bytes of a block mean. Refuses to know: files, layers, sessions, sockets. Invariant:
weights stay packed in memory; a decoder is a pure function of the bytes, on whatever device they
are, and equals the `gguf` package's dequantization value by value.
"""
