"""Faults that the tests must see: lines of the product, and what each becomes.

Owns: the list. Refuses to know: how tests are run (`run_mutate`). Invariant: each fault is one that
a programmer could make (a limit off by one, a check that is gone, a forgotten notice or rollback, a
wrong mask or scale) and changes what the program does; a change that nothing could notice is no
fault.

A fault is found by its text inside a function or class, whatever the breaks of lines, so it
survives moves of the function, in its file and to another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault.

    Args:
        name: The room it is in, and what is wrong.
        file: Below ds4py/; where the scope is looked for first.
        scope: Function or class that holds the text, such as `Scheduler.next`.
        old: Text that stands there once.
        new: What takes its place.
        tests: Files or folders below tests/ that ought to fail.
    """

    name: str
    file: str
    scope: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """What stands before the first dash of the name."""
        return self.name.partition("-")[0]


_WIRE: Final = ("unit/wire",)
_STAGE: Final = ("unit/stage",)
_RELAY: Final = ("unit/coordinator",)
_WORKER: Final = ("unit/worker",)
_MEMORY: Final = ("unit/kernels/test_memory.py",)
_FUSED: Final = ("unit/kernels/cpu/test_fused.py",)
_ROWS: Final = ("unit/layers/test_kv_cache.py",)
_GEMV: Final = ("unit/kernels/cpu/test_gemv.py",)
_TRITON: Final = ("unit/kernels/cuda/test_attention.py",)
_GEMM: Final = ("unit/kernels/cuda/test_linear.py",)

_FRAMES, _WORK = "wire/frames.py", "wire/work_messages.py"
_ROUTE, _SNAPSHOT = "wire/route.py", "wire/snapshot_messages.py"
_SCHEDULER, _TABLE = "stage/scheduler.py", "stage/session_table.py"
_STAGE_FILE, _RELAY_ROUTE = "stage/stage.py", "coordinator/relay/route.py"
_PREFILL, _FORWARDER = "coordinator/chunked_prefill.py", "worker/forwarder.py"
_HOP, _CHANNELS = "coordinator/relay/hop.py", "coordinator/relay/hop_channels.py"
_GPU_ATTENTION, _GPU_GEMM = "kernels/cuda/decode_attention.py", "kernels/cuda/gemm.py"
_CPU_FUSED, _DOOR = "kernels/cpu/fused.py", "kernels/memory.py"

MUTATIONS: Final = tuple(
    Mutation(*fields)
    for fields in (
        # --- wire: bytes to values and back -------------------------------------------------------
        (
            *("wire-magic-not-looked-at", _FRAMES, "FrameReader._header_filled"),
            *("if magic != MAGIC:", "if False:", _WIRE),
        ),
        (
            *("wire-size-one-over-the-limit", _FRAMES, "FrameReader._header_filled"),
            *("if size > limit:", "if size > limit + 1:", _WIRE),
        ),
        (
            *("wire-empty-unwanted-frame-passes", _FRAMES, "FrameReader._header_filled"),
            *("discarded=limit is None", "discarded=False", _WIRE),
        ),
        (
            *("wire-end-in-a-header-is-no-cut", _FRAMES, "FrameReader.mid_frame"),
            *("self._lent is not self._header", "self._body is not None", _WIRE),
        ),
        (
            *("wire-own-text-without-end", _FRAMES, "wire_text"),
            *('errors="replace")[:_MAX_OWN_TEXT]', 'errors="replace")', _WIRE),
        ),
        (
            *("wire-token-bytes-not-compared", _WORK, "Work.from_body"),
            *("header.token_bytes != 4 * header.n_tokens or sizes", "sizes", _WIRE),
        ),
        (
            *("wire-route-before-hidden-state", _WORK, "Work.encode"),
            *("self.input, self.route_blob )", "self.route_blob, self.input)", _WIRE),
        ),
        (
            *("wire-forwarded-asks-for-logits", _WORK, "forwarded"),
            *("& ~OUTPUT_LOGITS | INPUT_HC", "| INPUT_HC", _WIRE),
        ),
        (
            *("wire-forwarded-to-the-same-hop", _WORK, "forwarded"),
            *("route_index=work.route_index + 1", "route_index=work.route_index", _WIRE),
        ),
        (
            *("wire-one-record-too-many", _WORK, "ResultHeader.decode"),
            *("if count > MAX_HOPS:", "if count > MAX_HOPS + 1:", _WIRE),
        ),
        (
            *("wire-own-record-first", _WORK, "Result.relayed"),
            *("(*self.telemetry, telemetry)", "(telemetry, *self.telemetry)", _WIRE),
        ),
        (
            *("wire-relayed-count-without-ours", _WORK, "RelayedResult.encode"),
            *("header.telemetry_count + 1", "header.telemetry_count", _WIRE),
        ),
        (
            *("wire-route-with-a-gap", _ROUTE, "_decode_route"),
            *("!= entries[-1].layer_end + 1", "<= entries[-1].layer_end", _WIRE),
        ),
        (
            *("wire-route-port-zero", _ROUTE, "_decode_entry"),
            *("if not 1 <= port", "if not 0 <= port", _WIRE),
        ),
        (
            *("wire-route-one-trailing-byte", _ROUTE, "_check_return"),
            *("if len(rest):", "if len(rest) > 1:", _WIRE),
        ),
        (
            *("wire-hash-of-two-byte-tokens", "wire/prefix_hash.py", "extend"),
            *("(h ^ token >> 8) * _PRIME_3", "(h ^ token >> 8) * _PRIME_2", _WIRE),
        ),
        (
            *("wire-name-with-a-zero-byte", "wire/messages.py", "Hello.decode"),
            *("if 0 in name:", "if 0 in name[:1]:", _WIRE),
        ),
        (
            *("wire-chunk-over-the-limit", _SNAPSHOT, "SnapshotChunk.decode"),
            *("- _CHUNK.size <= MAX_CHUNK_DATA", "- _CHUNK.size", _WIRE),
        ),
        (
            *("wire-chunk-sends-the-last-again", _SNAPSHOT, "encode_chunks"),
            *("rest, held, room = rest[room:], [],", "rest, room = rest[room:],", _WIRE),
        ),
        (
            *("wire-answer-nobody-asked-for", "wire/conversation.py", "ProtocolState._advance"),
            *("if self._awaited == 0:", "if self._awaited < 0:", _WIRE),
        ),
        # --- scheduler: which work is next --------------------------------------------------------
        (
            *("scheduler-prompts-starve", _SCHEDULER, "Scheduler.next"),
            *("self._chunk_is_next = bool(batch)", "self._chunk_is_next = False", _STAGE),
        ),
        (
            *("scheduler-one-session-keeps-its-turn", _SCHEDULER, "Scheduler._take_chunk"),
            *("self._lines[session] = self._lines.pop(session)", "pass", _STAGE),
        ),
        (
            *("scheduler-batch-without-end", _SCHEDULER, "Scheduler._take_decodes"),
            *("[: self._max_batch]", "", _STAGE),
        ),
        (
            *("scheduler-not-in-order-of-arrival", _SCHEDULER, "Scheduler._first"),
            *("sorted(found, key=lambda pair: pair[0])", "found", _STAGE),
        ),
        (
            *("scheduler-one-call-at-a-time", _SCHEDULER, "Scheduler._take_calls"),
            *(
                "while ready := self._first(WorkKind.CONTROL):",
                "if ready := self._first(WorkKind.CONTROL):",
                _STAGE,
            ),
        ),
        (
            *("scheduler-target-rounded-down", _SCHEDULER, "Scheduler.target_batch"),
            *(
                "-(-len(set(self._latest)) // self._n_stages)",
                "len(set(self._latest)) // self._n_stages",
                _STAGE,
            ),
        ),
        (
            *("scheduler-waits-as-long-for-quick-batches", _SCHEDULER, "Scheduler.max_wait"),
            *(
                "min(MAX_WAIT_SECONDS, self._last_seconds * _WAIT_PART_OF_BATCH)",
                "MAX_WAIT_SECONDS",
                _STAGE,
            ),
        ),
        (
            *("scheduler-waits-for-a-full-batch-too", _SCHEDULER, "Scheduler.wants_more"),
            *("len(self) < self.target_batch", "len(self) <= self.target_batch", _STAGE),
        ),
        (
            *("scheduler-counts-its-own-session", _SCHEDULER, "Scheduler.expects_decodes_beside"),
            *("and not self._last <= {session}", "", _STAGE),
        ),
        # --- stage: sessions, hand-over, what is called off ---------------------------------------
        (
            *("stage-rewound-session-keeps-its-tokens", _TABLE, "SessionTable._match"),
            *("del cached.tokens[asked.pos0 :]", "pass", _STAGE),
        ),
        (
            *("stage-rewinds-whatever-the-hash", _TABLE, "SessionTable._match"),
            *(
                "if shorter and extend(INIT, cached.tokens[: asked.pos0]) == asked.prefix_hash:",
                "if shorter:",
                _STAGE,
            ),
        ),
        (
            *("stage-invalid-session-goes-on", _TABLE, "SessionTable._match"),
            *("usable = cached.valid or asked.pos0 == 0", "usable = True", _STAGE),
        ),
        (
            *("stage-commits-to-a-changed-session", _TABLE, "SessionTable.commit"),
            *("or cached.hash != asked.prefix_hash", "", _STAGE),
        ),
        (
            *("stage-failed-session-stays-valid", _TABLE, "SessionTable.evaluation_failed"),
            *("cached.valid = False del", "del", _STAGE),
        ),
        (
            *("stage-failed-span-is-not-rolled-back", _TABLE, "SessionTable.evaluation_failed"),
            *("del cached.tokens[asked.pos0 :]", "pass", _STAGE),
        ),
        (
            *("stage-one-slot-too-many", _TABLE, "SessionTable._make_room"),
            *(
                "len(self._sessions) < self._n_slots",
                "len(self._sessions) <= self._n_slots",
                _STAGE,
            ),
        ),
        (
            *("stage-closed-connection-still-owns", _TABLE, "SessionTable.disown"),
            *("cached.owners.discard(owner)", "pass", _STAGE),
        ),
        (
            *("stage-evicted-cache-is-not-dropped", _TABLE, "SessionTable.reserve_slot"),
            *("gone.append(evict)", "pass", _STAGE),
        ),
        (
            *("stage-bell-rings-once-for-many", "stage/mailbox.py", "Mailbox.get"),
            *("if self._items:", "if False:", _STAGE),
        ),
        (
            *("stage-older-mark-takes-back-a-newer", _STAGE_FILE, "AbortedRequests.mark"),
            *("max(before, last_request)", "last_request", _STAGE),
        ),
        (
            *("stage-gone-owner-keeps-its-sessions", _STAGE_FILE, "Stage._disown_if_gone"),
            *("if owner.gone:", "if False:", _STAGE),
        ),
        (
            *("stage-evaluates-for-nobody", _STAGE_FILE, "_Job.admit"),
            *("if not self.done.set_running_or_notify_cancel():", "if False:", _STAGE),
        ),
        (
            *("stage-loads-beside-what-it-holds", _STAGE_FILE, "Stage.load"),
            *("self.sessions.reserve_slot(session)", "()", ("unit/worker/test_kv_transfer.py",)),
        ),
        # --- relay: a route, its connections, what is in flight -----------------------------------
        (
            *("relay-who-waits-is-not-told", _HOP, "Link._stop"),
            *("waiting.box.put(HopReply(request_id, cause))", "pass", _RELAY),
        ),
        (
            *("relay-answer-is-taken-twice", _HOP, "Link._handle"),
            *(
                "self._pending.pop(result.request_id, None)",
                "self._pending.get(result.request_id)",
                _RELAY,
            ),
        ),
        (
            *("relay-token-counts-as-a-prompt", _HOP, "Link.carries_chunks"),
            *("pending.n_tokens > 1", "pending.n_tokens > 0", _RELAY),
        ),
        (
            *("relay-share-rounded-down-to-none", _CHANNELS, "HopChannels.share"),
            *(
                "-(-window // max(1, self._n_prefills))",
                "window // max(1, self._n_prefills)",
                _RELAY,
            ),
        ),
        (
            *("relay-prompt-counts-for-ever", _CHANNELS, "HopChannels.prefilling"),
            *("self._n_prefills -= 1", "pass", _RELAY),
        ),
        (
            *(
                "relay-route-ends-without-a-head",
                "coordinator/relay/planner.py",
                "plan_route.usable",
            ),
            *("(worker.layers.end < last or demand.local_head)", "True", _RELAY),
        ),
        (
            *("relay-window-of-one-less", _PREFILL, "window_size"),
            *("n_hops + 2", "n_hops + 1", _RELAY),
        ),
        (
            *("relay-resets-what-is-cached", _RELAY_ROUTE, "work_flags"),
            *("if chunk.pos0 == 0:", "if True:", _RELAY),
        ),
        (
            *("relay-last-chunk-answers-done-only", _RELAY_ROUTE, "work_flags"),
            *("if ack_early and not chunk.n_logits:", "if ack_early:", _RELAY),
        ),
        (
            *("relay-logits-of-other-rows", _PREFILL, "_one_row_each"),
            *("max(0, rest - 1)", "max(0, rest - 2)", _RELAY),
        ),
        (
            *(
                "relay-answers-in-the-order-of-arrival",
                "coordinator/relay/run.py",
                "PipelinedRun.run",
            ),
            *("for index in sorted(self._logits)", "for index in self._logits", _RELAY),
        ),
        (
            *("relay-one-span-over-the-window", _PREFILL, "Window.next_chunk"),
            *(">= self._size", "> self._size", _RELAY),
        ),
        (
            *("relay-hop-window-one-over", _FORWARDER, "Forwarder._has_room"),
            *("return n_alike <", "return n_alike <=", _WORKER),
        ),
        (
            *("relay-answer-does-not-open-the-window", _FORWARDER, "Forwarder.relay"),
            *("self._advance()", "pass", _WORKER),
        ),
        (
            *("relay-lost-hop-leaves-requests-unanswered", _FORWARDER, "Forwarder.lost"),
            *(
                "given_up, self._pending = list(self._pending.values()), {}",
                "self._pending = {}",
                _WORKER,
            ),
        ),
        (
            *("relay-request-id-twice-in-flight", _FORWARDER, "Forwarder._problem"),
            *("if waits or request_id in self._pending:", "if waits:", _WORKER),
        ),
        # --- kernels: addresses, masks, scales ----------------------------------------------------
        (
            *("kernels-gaps-are-not-seen", _DOOR, "KernelBuffer.__init__"),
            *("or not tensor.is_contiguous()", "", _MEMORY),
        ),
        (
            *("kernels-type-is-not-looked-at", _DOOR, "check_launch"),
            *("and tensor.dtype in dtypes", "", _MEMORY),
        ),
        (
            *("kernels-unaligned-cache", _DOOR, "cache_address"),
            *("if address % ALIGNMENT:", "if address % 2:", _MEMORY),
        ),
        (
            *("kernels-position-one-beyond", _CPU_FUSED, "CachedPosition.check"),
            *("self.position < room:", "self.position <= room:", _FUSED),
        ),
        (
            *("kernels-scores-scaled-by-width", _CPU_FUSED, "_Attention.rotate_queries"),
            *("1 / math.sqrt(D)", "1 / D", _FUSED),
        ),
        (
            *("kernels-padding-has-weight", _CPU_FUSED, "_Attention.softmax"),
            *(
                "k.store(F32(-math.inf), k.at(line, place, 4))",
                "k.store(F32(0), k.at(line, place, 4))",
                _FUSED,
            ),
        ),
        (
            *("kernels-turned-the-other-way", _CPU_FUSED, "_Attention._turn"),
            *("(lane % 2 == 0)", "(lane % 2 == 1)", _FUSED),
        ),
        (
            *("kernels-norm-without-eps", _CPU_FUSED, "_norm"),
            *('b.fadd(mean, k.real("eps"))', "mean", _FUSED),
        ),
        (
            *("kernels-product-beyond-the-result", "kernels/cpu/gemv.py", "PackedRows.multiply"),
            *("not 0 <= column <= stride - self.n_rows", "not 0 <= column", _GEMV),
        ),
        (
            *("kernels-product-is-not-added", "kernels/cpu/gemv.py", "PackedRows.multiply"),
            *("stride, add, )", "stride, False)", _GEMV),
        ),
        (
            *("kernels-scale-of-another-block", "kernels/cpu/cache_rows.py", "_Codes.read"),
            *("4 * (at // self._block)", "4 * (at // self._width)", _ROWS),
        ),
        (
            *("kernels-rows-normed-once-more", "kernels/cpu/sinkhorn.py", "_balance"),
            *(
                'k.loop(1, k.integer("iterations"))',
                'k.loop(0, k.integer("iterations"))',
                ("unit/kernels/cpu/test_sinkhorn.py",),
            ),
        ),
        (
            *("kernels-own-key-is-not-seen", _GPU_ATTENTION, "_attend_split"),
            *("(tl.load(positions + session) + 1)", "tl.load(positions + session)", _TRITON),
        ),
        (
            *("kernels-splits-keep-old-sums", _GPU_ATTENTION, "_attend_split"),
            *("total = total * kept +", "total = total +", _TRITON),
        ),
        (
            *("kernels-rows-beyond-the-end-seen", _GPU_ATTENTION, "_attend_split"),
            *('score = tl.where(seen[None, :], score, -float("inf"))', "", _TRITON),
        ),
        (
            *("kernels-values-are-turned-too", "kernels/cuda/rope_store.py", "_rotate_and_store"),
            *("tl.where(head < first_value, ROTATED, 0)", "ROTATED", _TRITON),
        ),
        (
            *("kernels-second-token-lost", _GPU_GEMM, "gemv"),
            *("mask=token + 1 < n_tokens", "mask=token + 2 < n_tokens", _GEMM),
        ),
        (
            *("kernels-columns-beyond-the-row", _GPU_GEMM, "gemm"),
            *(
                "there = (own < n_parts) & (token[None, :] < n_tokens)",
                "there = (own <= n_parts) & (token[None, :] < n_tokens)",
                _GEMM,
            ),
        ),
    )
)
