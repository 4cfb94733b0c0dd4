"""The tables of wire-protocol.md#hello, #work and #result as pure functions: is it acceptable?

Owns: every check of these tables, in their order, and the words that a refused peer reads. Refuses
to know: sockets, threads, sessions and their hashes (rows from 24 on belong to
`stage.session_table`).
Invariant: the first failing row decides, because peers are tested for exactly that.

Each table is a generator of faults, read from top to bottom; the first one is taken and the rows
behind it are not even computed, so a row may rely on those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

from ds4py.activations import WIDTHS, HiddenBatch
from ds4py.errors import RemoteProtocolError
from ds4py.layer_range import LayerRange
from ds4py.wire.extensions import PeerHello
from ds4py.wire.frames import MAX_U32, printable
from ds4py.wire.messages import Hello, Result, ResultKind, Work, WorkHeader
from ds4py.wire.prefix_hash import extend
from ds4py.wire.route import HopEntry, decode_route
from ds4py.wire.work_messages import ACK_ONLY, INPUT_HC, KNOWN_FLAGS, OUTPUT_LOGITS

_MAX_TOKEN: Final = 2**31 - 1

Faults = Iterator[tuple[str, str]]
"""(class name of the spec, text for the peer), the first one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a peer is not accepted.

    Args:
        kind: Class name of the spec, such as "H-CTX".
        text: One line for the peer.
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorFacts:
    """What a HELLO is compared with; `n_ctx` 0 accepts any context."""

    model_id: int
    name: str
    n_layers: int
    n_ctx: int


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


def check_hello(hello: Hello | PeerHello, facts: CoordinatorFacts) -> Refusal | None:
    """Go through rows 5 to 14 of the table in wire-protocol.md#hello; rows 1 to 4 are decoding.

    Args:
        hello: What a worker said, in plain or in extended form.
        facts: Of this coordinator.

    Returns:
        None if the worker may serve.
    """
    for kind, text in _hello_faults(hello, facts):
        return Refusal(kind=kind, text=text)
    return None


def _hello_faults(hello: Hello | PeerHello, facts: CoordinatorFacts) -> Faults:
    ours = facts.name.encode("utf-8", errors="replace")
    name = hello.model_name
    theirs = name if isinstance(name, bytes) else name.encode("utf-8", errors="replace")
    same_file = "; start both with the same model"
    if hello.model_id != facts.model_id:
        both = f"worker={hello.model_id} coordinator={facts.model_id}"
        yield "H-MODEL-ID", f"model id mismatch: {both}{same_file}"
    if theirs != ours:
        both = f"worker={printable(theirs)} coordinator={printable(ours)}"
        yield "H-MODEL-NAME", f"model family mismatch: {both}{same_file}"
    if hello.n_layers != facts.n_layers:
        both = f"worker={hello.n_layers} coordinator={facts.n_layers}"
        yield "H-LAYERS", f"layer count mismatch: {both}{same_file}"
    if hello.quant_bits not in {2, 4}:
        yield "H-QUANT", f"unsupported worker quant profile Q{hello.quant_bits}"
    if hello.has_output > 1:
        yield "H-OUTFLAG", f"invalid worker output-head flag {hello.has_output}"
    if hello.has_hidden > 1:
        yield "H-HIDFLAG", f"invalid worker hidden-state flag {hello.has_hidden}"
    yield from _range_faults(hello, facts)
    if facts.n_ctx and hello.ctx_size < facts.n_ctx:
        both = f"worker={hello.ctx_size} coordinator={facts.n_ctx}"
        hint = f"; start the worker with a context of at least {facts.n_ctx} tokens"
        yield "H-CTX", f"worker context too small: {both}{hint}"
    # an extended peer that was dialled is reached where it was dialled, and names no port
    if hello.listen_port is not None and not 1 <= hello.listen_port <= 65535:
        yield "H-PORT", f"invalid worker data listen port {hello.listen_port}"


def _range_faults(hello: Hello | PeerHello, facts: CoordinatorFacts) -> Faults:
    """Rows 11 and 12."""
    start, end = hello.layer_start, hello.layer_end
    if start is None or end is None:
        yield "H-RANGE", f"worker names no layers of the {facts.n_layers} layers"
    elif not start <= end < facts.n_layers:
        yield (
            "H-RANGE",
            f"invalid worker layer range {start}:{end} for {facts.n_layers} layers",
        )
    elif hello.has_output and end + 1 != facts.n_layers:
        where = f"range={start}:{end} layers={facts.n_layers}"
        yield "H-OUTRANGE", f"worker output head requires final layer: {where}"


class Awaited(Enum):
    """Which answers a span admits (docs/spec/wire-protocol.md#accepted-results, #decode)."""

    CHUNK = "a chunk of a pipelined prefill, not the last"
    LAST_CHUNK = "the last chunk of a pipelined prefill"
    SPAN = "a single span: decode, or prefill without a pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedResult:
    """What a RESULT is compared with.

    Args:
        result_hash: Of the WORK.
        n_tokens: Of the WORK.
        n_vocab: Vocabulary size.
        hidden_width: Values per token.
        awaited: Which answers are admitted.
        final_has_output: The route's final entry has the output flag.
    """

    result_hash: int
    n_tokens: int
    n_vocab: int
    hidden_width: int
    awaited: Awaited
    final_has_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedResult:
    """A good answer.

    Args:
        kind: What came.
        payload: Little-endian f32 logits, a packed hidden state, or nothing; a view.
        hidden: The hidden state `[T, W]` in the width that the worker chose.
    """

    kind: ResultKind
    payload: memoryview
    hidden: HiddenBatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedResult:
    """A bad answer.

    Args:
        cause: "remote": the stage refused or failed, replay on the same route. "transport": the
            answer cannot be trusted, the connection must go.
        kind: Class name of the spec; "R-STATUS" for row 7.
        text: The stage's own words, or what is wrong with the answer.
    """

    cause: Literal["remote", "transport"]
    kind: str
    text: str


def check_result(result: Result, expected: ExpectedResult) -> AcceptedResult | FailedResult:
    """Go through rows 7 to 10 of wire-protocol.md#result; rows 1 to 6 are reading and matching."""
    if result.status != 0:
        return FailedResult(cause="remote", kind="R-STATUS", text=result.text or "(no reason)")
    for kind, text in _result_faults(result, expected):
        return FailedResult(cause="transport", kind=kind, text=text)
    kind_of = ResultKind(result.result_kind)
    hidden = None
    if kind_of is ResultKind.HIDDEN_STATE:
        bits = result.payload_bits or 32
        hidden = HiddenBatch(expected.n_tokens, expected.hidden_width, bits, result.payload)
    return AcceptedResult(kind=kind_of, payload=result.payload, hidden=hidden)


def _result_faults(result: Result, expected: ExpectedResult) -> Faults:
    size, bits = result.payload.nbytes, result.payload_bits or 32
    is_hidden = result.result_kind == ResultKind.HIDDEN_STATE
    if is_hidden and size:
        if bits not in WIDTHS:
            yield "R-DECODE", f"RESULT hidden-state of {bits} bits, expected 32, 16 or 8"
        if size % (bits // 8) or size * 32 // bits > MAX_U32:
            yield "R-DECODE", f"RESULT hidden-state of {size} bytes cannot be {bits}-bit values"
    if result.result_hash != expected.result_hash:
        got = f"{result.result_hash:016x}, expected {expected.result_hash:016x}"
        yield "R-HASH", f"RESULT is for another prefix: hash {got}"
    if not _admitted(result, expected, decoded_bytes=size * 32 // bits if is_hidden else size):
        yield (
            "R-KIND",
            f"RESULT of kind {result.result_kind} with {size} bytes does not answer "
            f"{expected.awaited.value} of {expected.n_tokens} tokens",
        )


def _admitted(result: Result, expected: ExpectedResult, *, decoded_bytes: int) -> bool:
    """Row 10: whether the kind and size answer this request."""
    match result.result_kind:
        case ResultKind.ACK:
            return decoded_bytes == 0 and expected.awaited is Awaited.CHUNK
        case ResultKind.LOGITS:
            return decoded_bytes == 4 * expected.n_vocab
        case ResultKind.HIDDEN_STATE:
            pipelined = expected.awaited is not Awaited.SPAN
            if pipelined and expected.final_has_output:
                return False
            return decoded_bytes == 4 * expected.n_tokens * expected.hidden_width
        case _:
            return False
