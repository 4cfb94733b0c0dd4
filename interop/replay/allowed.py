"""Where ds4py does not do what the C programs did, because the specification recommends better.

Owns: the explicit list, and how a recording changes by each entry. Refuses to know: sockets.
Invariant: what is not in `ALLOWED` is a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ds4py.wire.messages import Hello, Result, Telemetry, Work, forwarded
from ds4py.wire.route import decode_route
from interop.replay.recording import Conversation, Said, Scenario

Talks = tuple[Conversation, ...]


@dataclass(frozen=True, slots=True)
class Allowed:
    """One deviation.

    Args:
        scenario: Where it shows; empty: everywhere.
        live: The party that deviates; empty: every one.
        what: For people.
        spec: Where docs/spec/wire-protocol.md allows it.
        amend: Turns the recorded connections of the party into what is expected of ds4py.
    """

    scenario: str
    live: str
    what: str
    spec: str
    amend: Callable[[Talks], Talks] = lambda talks: talks


def amended(scenario: Scenario, live: str) -> tuple[Talks, list[Allowed]]:
    """Return what is expected of a live party, and why that is not what was recorded."""
    talks = tuple(t for t in scenario.conversations if live in (t.connector, t.acceptor))
    entries = [a for a in ALLOWED if a.scenario == scenario.name and a.live == live]
    for entry in entries:
        talks = entry.amend(talks)
    return talks, entries


def _keep_upstream(talks: Talks) -> Talks:
    """Continue over the first control connection, whose sessions live on.

    The refused span is then forwarded: the worker has its prefix, the new next hop has not.
    """
    first, second, hop_before, hop = (
        next(t for t in talks if t.name == name)
        for name in ("ctlA-0", "ctlA-1", "dataB-0", "dataB-1")
    )
    work, refusal, *rest = (s for s in second.frames if not isinstance(s.message, Hello))
    assert isinstance(work.message, Work)
    assert isinstance(refusal.message, Result)
    onward = _forwarded(work.message, hop)
    relayed = refusal.message.relayed(_record(work.message, onward))
    control = replace(
        first,
        frames=(*first.frames, work, Said(refusal.by, relayed), *rest),
        closed_by=second.closed_by,
    )
    refused = (Said(hop.connector, onward), Said(hop.acceptor, refusal.message))
    return control, hop_before, replace(hop, frames=(*refused, *hop.frames))


def _forwarded(work: Work, hop: Conversation) -> Work:
    """Return what the next hop gets: its input was recorded as the last row of the replay."""
    replayed = next(
        said.message
        for said in hop.frames
        if isinstance(said.message, Work) and said.message.result_hash == work.result_hash
    )
    row = replayed.input[-replayed.input.nbytes // replayed.n_tokens :]
    entries = decode_route(work.route_blob, work.route_count, replayed.layer_end + 1)
    return forwarded(work, entries[work.route_index + 1], row, work.bits)


def _record(work: Work, onward: Work) -> Telemetry:
    """Return a relay's record (wire-protocol.md#return-path); its times are not compared."""
    return Telemetry(
        layer_start=work.layer_start,
        layer_end=work.layer_end,
        route_index=work.route_index,
        pos0=work.pos0,
        n_tokens=work.n_tokens,
        eval_usec=0,
        input_bytes=work.token_bytes + work.input_hc_bytes,
        output_bytes=onward.input_hc_bytes,
    )


def general() -> list[Allowed]:
    """Return the deviations that may show anywhere."""
    return [entry for entry in ALLOWED if not entry.scenario]


ALLOWED: Final = (
    Allowed(
        scenario="",
        live="",
        what="the text of a refusal may go on after the recorded words, with what to do about it",
        spec="wire-protocol.md#terms: nobody parses texts",
    ),
    Allowed(
        scenario="",
        live="",
        what="a worker that dials offers extensions first; turned away in silence, as by a C "
        "program, it comes back at once with the recorded protocol",
        spec="wire-protocol.md#reading-rules, #hello; docs/design/protocol-extensions.md",
    ),
    Allowed(
        scenario="kv_mismatch_3hop",
        live="worker A",
        what="a worker whose next hop died keeps its upstream connection and its sessions: it does "
        "not register again, and the refusal is the new next hop's, with one record more",
        spec="wire-protocol.md#checklist 42 and 61, #quirks Q8, #return-path",
        amend=_keep_upstream,
    ),
)
