"""HTTP front of ds4py: requests in, replies out, in the APIs of OpenAI and Anthropic.

Owns: routes, request bodies, reply shapes, SSE, the bridge between the event loop and the threads
that generate, what is remembered of conversations, what is measured. Refuses to know: torch, DS4D,
where layers are; everything below is one `Backend`. Invariant: a client never sees a traceback, and
a client that is gone costs at most one more token or prefill chunk.

A request's way: `http.middleware` -> `http.endpoint` -> `api.<endpoint>.request` and
`requests.prompts` (on a helper thread of the loop, let in by `http.admission`) -> `requests.queue`
(crossing down) -> `requests.worker` and `requests.output` (on a generation thread) ->
`requests.queue` (crossing up) -> `http.sse` with the shapes of `api.<endpoint>.response`. What a
client asks for is one `requests.request.GenerationRequest` all the way.
"""
