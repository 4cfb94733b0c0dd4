"""HTTP front of ds4py: requests in, text out, in the OpenAI dialect.

Owns: routes, request schemas, reply shapes, SSE, the bridge between the event loop and the threads
that generate. Refuses to know: torch, DS4D, where layers are; everything below is one `Backend`.
Invariant: a client never sees a traceback, and a client that is gone costs at most one more token
or prefill chunk.

A request's way: `app` -> `endpoint` -> `schema` and `prompts` (a worker thread of the loop) ->
`jobs` (crossing down) -> `work` (on a generation thread) -> `jobs` (crossing up) -> `deliver` with
the shapes of `openai`.
"""
