"""Architectures: what a slice of layers computes, in torch.

Owns: one module or folder per architecture, each with one public name, `ARCHITECTURE`. Refuses to
know: files, sessions, sockets, packing for the wire. Invariant: layers carry their global numbers,
and a slice's result does not depend on which process computes it.

Axis glossary: `T` tokens in the span, `W` hidden width, `H` query heads, `G` key/value heads,
`D` head width, `V` vocabulary, `C` context positions, `S` sessions (slots).
"""
