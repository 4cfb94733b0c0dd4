"""Streams: addresses, connecting, listening, frames in and out, and telling DS4D from HTTP.

Read upwards: `sockets` (options, addresses, listeners), `stream` (bytes, the contract and its form
over TCP), `security` (what comes before the first frame), `connection` and `outbox` (frames),
`connector` and `acceptor` (who make connections, for every other room).

Owns: every socket of ds4py outside the HTTP library. Refuses to know: what a message means, layers,
tensors. Invariant: `OSError` never leaves this room; it becomes a `TransportError` that names the
peer, or a `ConfigError` where the user must choose another address.
"""
