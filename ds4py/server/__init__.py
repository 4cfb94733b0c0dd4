"""HTTP front of ds4py: requests in, replies out, in the dialects of OpenAI and Anthropic.

Owns: routes, request bodies, reply shapes, SSE, the bridge between the event loop and the threads
that generate, what is remembered of conversations, what is measured. Refuses to know: torch, DS4D,
where layers are; everything below is one `Backend`. Invariant: a client never sees a traceback, and
a client that is gone costs at most one more token or prefill chunk.

A request's way: `app` -> `border` -> `endpoint` -> a dialect (`bodies`, `prompts`; on a helper
thread of the loop, let in by `intake`) -> `jobs` (crossing down) -> `work` and `reply_events` (on a
generation thread) -> `jobs` (crossing up) -> `deliver` with the shapes of `replies`.
"""
