"""What a hop answers to a span, as frames of the wire.

Owns: which output a span asks for (docs/spec/wire-protocol.md#outputs), the RESULT and the
telemetry that come of it. Refuses to know: connections, sessions. Invariant: the payload is what
the request asked for, in the width in which it came.
"""

from __future__ import annotations

from typing import Final

from ds4py.contracts import ForwardOutput, OutputKind
from ds4py.peer.validation import AcceptedWork
from ds4py.wire.messages import Result, ResultKind, Telemetry

_EMPTY: Final = memoryview(b"")


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
