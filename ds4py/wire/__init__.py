"""DS4D bytes to frozen values and back (docs/spec/wire-protocol.md).

Owns: frames, messages, routes, the prefix hash, the extension frames, and who may say what when.
Refuses to know: sockets, threads, clocks, logs, torch. Invariant: any bytes at all give a message
or a `RemoteProtocolError`, and no size from a peer is believed before it was compared with a limit.
"""
