"""Between frames and the stage: is this WORK acceptable, what does it ask for, what is answered?

Owns: the table of docs/spec/wire-protocol.md#work in its order, with the words that a refused peer
reads; which output a span asks for (8.6); the RESULT and the telemetry that come of it. Refuses to
know: connections, threads, sessions and their hashes (rows from 24 on belong to
`stage.session_table`). Invariant: the first failing row decides, because peers are tested for
exactly that; a payload is what the request asked for, in the width in which it came.

The table is a generator of faults, read from top to bottom; the first one is taken and the rows
behind it are not even computed, so a row may rely on those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from ds4py.activations import WIDTHS, HiddenBatch
from ds4py.contracts import ForwardOutput, OutputKind, SessionId
from ds4py.errors import RemoteProtocolError
from ds4py.layer_range import LayerRange
from ds4py.stage.session_table import StageRequest
from ds4py.wire.frames import MAX_U32
from ds4py.wire.prefix_hash import extend
from ds4py.wire.route import HopEntry, decode_route
from ds4py.wire.work_messages import (
    ACK_ONLY,
    INPUT_HC,
    KNOWN_FLAGS,
    OUTPUT_LOGITS,
    RESET_SESSION,
    Result,
    ResultKind,
    Telemetry,
    Work,
    WorkHeader,
)

_EMPTY: Final = memoryview(b"")
_MAX_TOKEN: Final = 2**31 - 1

Faults = Iterator[tuple[str, str]]
"""(class name of the spec, text for the peer), the first one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a WORK is compared with."""

    model_id: int
    layers: LayerRange
    n_layers: int
    n_ctx: int
    n_vocab: int
    hidden_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedWork:
    """A WORK that gets an error RESULT; the connection stays open.

    Args:
        request_id: To echo; 0 if it could not be read.
        kind: Class name of the spec, such as "W-SIZES".
        text: For the peer.
    """

    request_id: int
    kind: str
    text: str


class AcceptedWork(NamedTuple):
    """A WORK that passed rows 1 to 23, and what it asks of this hop.

    Args:
        work: The message.
        entry: This hop's route entry.
        next_entry: The next hop; None on the final one.
        wants_logits: Answer with logits of the last token.
        ack_only: Answer without a payload.
        hidden: The input; None exactly when the slice starts at layer 0.
    """

    work: Work
    entry: HopEntry
    next_entry: HopEntry | None
    wants_logits: bool
    ack_only: bool
    hidden: HiddenBatch | None

    @property
    def is_final(self) -> bool:
        """Whether this hop answers instead of forwarding."""
        return self.next_entry is None


def check_work(body: memoryview, facts: WorkerFacts) -> AcceptedWork | RefusedWork:
    """Go through rows 1 to 23 (and 28, before any harm is done) of wire-protocol.md#work.

    Args:
        body: Body of a WORK frame; an accepted work holds views into it.
        facts: Of this worker.
    """
    request_id = 0
    try:
        header = WorkHeader.decode(body)
        request_id = header.request_id
        work = Work.from_body(header, body)
        _raise_first(_work_faults(work, facts))
        route = decode_route(work.route_blob, work.route_count, facts.n_layers)
        entry = route[work.route_index]
        next_entry = route[work.route_index + 1] if work.route_index + 1 < len(route) else None
        _raise_first(_entry_faults(work, entry, next_entry))
    except RemoteProtocolError as error:
        return RefusedWork(request_id=request_id, kind=error.kind, text=error.what)
    flags, hidden = int(work.flags), None
    if flags & INPUT_HC:
        hidden = HiddenBatch(work.n_tokens, facts.hidden_width, work.bits, work.input)
    ack_only = next_entry is None and bool(flags & ACK_ONLY)
    wants_logits = bool(flags & OUTPUT_LOGITS) and not ack_only
    return AcceptedWork(
        work=work,
        entry=entry,
        next_entry=next_entry,
        wants_logits=wants_logits,
        ack_only=ack_only,
        hidden=hidden,
    )


def _raise_first(faults: Faults) -> None:
    for kind, text in faults:
        raise RemoteProtocolError(text, kind=kind)


def _work_faults(work: Work, facts: WorkerFacts) -> Faults:
    """Rows 3 to 19."""
    layers, flags, n_tokens = facts.layers, int(work.flags), len(work.tokens)
    if work.route_count == 0:
        yield "W-NOROUTE", "WORK frame is missing distributed route"
    if work.route_index >= work.route_count:
        yield "W-ROUTEIDX", "invalid distributed WORK route metadata"
    if work.model_id != facts.model_id:
        yield "W-MODEL", f"model id mismatch: work={work.model_id} worker={facts.model_id}"
    if work.layer_start != layers.start or work.layer_end != layers.end:
        asked = f"{work.layer_start}:{work.layer_end}"
        yield (
            "W-LAYERS",
            f"worker is assigned layers {layers.start}:{layers.end} but request asked for {asked}",
        )
    if flags & ~KNOWN_FLAGS:
        yield "W-FLAGS", "invalid distributed WORK flags"
    if n_tokens == 0:
        yield "W-EMPTY", "WORK frame has no tokens"
    if work.pos0 + n_tokens > facts.n_ctx:
        yield "W-CTX", "WORK token span exceeds worker context"
    yield from _flag_faults(work, flags, facts)
    if max(work.tokens) > min(_MAX_TOKEN, facts.n_vocab - 1):
        yield "W-VOCAB", "WORK token id is outside the model vocabulary"
    if extend(work.prefix_hash, work.tokens) != work.result_hash:
        yield "W-HASHMETA", "WORK token prefix hash metadata mismatch"
    yield from _input_faults(work, flags, n_tokens * facts.hidden_width)


def _flag_faults(work: Work, flags: int, facts: WorkerFacts) -> Faults:
    """Rows 10 to 13."""
    has_input = flags & INPUT_HC
    if has_input and work.layer_start == 0:
        yield "W-INPUT0", "layer 0 WORK must not carry an input hidden-state"
    if not has_input and work.layer_start != 0:
        yield "W-NOINPUT", "nonzero layer WORK requires input hidden-state"
    if flags & OUTPUT_LOGITS and not facts.layers.has_output:
        yield "W-NOHEAD", "worker was not assigned the output head"
    if flags & OUTPUT_LOGITS and work.layer_end + 1 != facts.n_layers:
        yield "W-NOTLAST", "WORK logits require the final layer"


def _input_faults(work: Work, flags: int, n_values: int) -> Faults:
    """Rows 16 to 19."""
    if n_values * 4 > MAX_U32:
        yield "W-TOOBIG", "WORK hidden-state is too large for a frame"
    if flags & INPUT_HC:
        bits = work.bits
        if bits not in WIDTHS:
            yield "W-BITS", "invalid distributed activation width"
        if work.input_hc_bytes != n_values * bits // 8:
            yield "W-HCSIZE", "input hidden-state size does not match token span"
    elif work.input_hc_bytes:
        yield "W-STRAYHC", "WORK carries a hidden-state without announcing it"


def _entry_faults(work: Work, entry: HopEntry, next_entry: HopEntry | None) -> Faults:
    """Rows 21, 22, and 28: ds4 finds the last one only after its cache has advanced."""
    flags = int(work.flags)
    logits = bool(flags & OUTPUT_LOGITS)
    if entry.layer_start != work.layer_start or entry.layer_end != work.layer_end:
        yield "W-RLAYERS", "WORK layer range does not match route entry"
    if entry.has_output != logits:
        yield "W-RLOGITS", "WORK logits flag does not match route entry"
    # row 23 cannot fail: logits need the last layer (13), and no entry can follow it (20)
    silent = next_entry is None and (logits or flags & ACK_ONLY)
    if not silent and work.bits not in WIDTHS:
        yield "W-OUTSIZE", "invalid distributed activation width"


def stage_request(accepted: AcceptedWork) -> StageRequest:
    """Return what the stage is asked for."""
    work = accepted.work
    return StageRequest(
        session=SessionId(work.session_id),
        tokens=work.tokens,
        pos0=work.pos0,
        prefix_hash=work.prefix_hash,
        result_hash=work.result_hash,
        reset=bool(int(work.flags) & RESET_SESSION),
        hidden=accepted.hidden,
        output_kind=output_kind_of(accepted),
        reply_bits=work.bits,
        request_id=work.request_id,
    )


def output_kind_of(accepted: AcceptedWork) -> OutputKind:
    """Return what this hop has to produce."""
    if accepted.next_entry is not None:
        return OutputKind.HIDDEN
    if accepted.ack_only:
        return OutputKind.NOTHING
    return OutputKind.LOGITS if accepted.wants_logits else OutputKind.HIDDEN


def final_result(accepted: AcceptedWork, output: ForwardOutput, telemetry: Telemetry) -> Result:
    """Return the RESULT of the last hop of a route."""
    kind, payload, bits = _payload(output)
    return Result(
        request_id=accepted.work.request_id,
        result_hash=accepted.work.result_hash,
        result_kind=kind,
        telemetry=(telemetry,),
        payload=payload,
        payload_bits=bits,
    )


def telemetry_of(accepted: AcceptedWork, output: ForwardOutput) -> Telemetry:
    """Return a hop's own record of one span."""
    work = accepted.work
    return Telemetry(
        layer_start=work.layer_start,
        layer_end=work.layer_end,
        route_index=work.route_index,
        pos0=work.pos0,
        n_tokens=len(work.tokens),
        eval_usec=min(output.eval_usec, 2**32 - 1),
        input_bytes=work.token_bytes + work.input_hc_bytes,
        output_bytes=_payload(output)[1].nbytes,
    )


def _payload(output: ForwardOutput) -> tuple[ResultKind, memoryview, int]:
    if output.logits is not None:
        return ResultKind.LOGITS, output.logits.astype("<f4", copy=False).data.cast("B"), 32
    if output.hidden is not None:
        return ResultKind.HIDDEN_STATE, output.hidden.data, output.hidden.bits
    return ResultKind.ACK, _EMPTY, 0
