"""When sessions go to disk and come back, around the work for one request.

Owns: the moments of docs/spec/server-and-cli.md#matching-order, #disk-cache (cold, continued,
evict, shutdown), and the texts by which a prefix is found again. Refuses to know: files, requests,
how tokens are chosen. Invariant: whatever fails here costs a warning and the evaluation of a
prompt, never an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ds4py.contracts import Cancelled, Progress, Session
from ds4py.errors import CancelledError, Ds4Error
from ds4py.server.history.exact_tokens import ExactTokens
from ds4py.server.history.tool_calls import ToolCallMemory
from ds4py.snapshot.disk_cache import Checkpoint, DiskCache, Hit
from ds4py.snapshot.kvc import Flag, KvcHeader, Reason
from ds4py.snapshot.kvc_policy import cold_anchor, may_store_cold, should_store_continued
from ds4py.text.tokenizer.tokenizer import Tokenizer
from ds4py.text.tool_calls.tagged import blocks_in

_log = logging.getLogger(__name__)

PrefixLength = Callable[[], int]
"""Returns how many tokens of a prompt stand before its first question."""


class DiskPrefixCache:
    """The disk cache of one server; any number of threads may use it at once.

    Args:
        disk: The files.
        tokenizer: Of the model.
        tools: Words of calls, saved and loaded with the prompts that hold them.
        exact_tokens: What is visible of sessions with hidden reasoning.
    """

    def __init__(
        self,
        disk: DiskCache,
        tokenizer: Tokenizer,
        tools: ToolCallMemory,
        exact_tokens: ExactTokens,
    ) -> None:
        self._disk = disk
        self._tokenizer = tokenizer
        self._tools = tools
        self._exact_tokens = exact_tokens
        self._refused: set[str] = set()

    def recall_calls(self, ids: Sequence[str]) -> None:
        """Remember calls again that files know and this server does not."""
        unknown = self._tools.unknown(ids)
        if unknown:
            self._tools.restore(self._disk.tool_blocks([id_.encode() for id_ in unknown]))

    def resume(self, session: Session, prompt: Sequence[int]) -> tuple[int, ...]:
        """Bring a session as near to a prompt as a file can.

        What the session loses by that, or will lose to an unrelated prompt, is saved before.

        Returns:
            The prompt to evaluate: it may begin with hidden tokens of a file.
        """
        n_reusable = session.reusable(prompt)
        found = self._better(prompt, n_reusable, session.n_ctx)
        if session.tokens and (found is not None or n_reusable < len(session.tokens)):
            self.save(session, Reason.EVICT)
        while found is not None:
            hit, rest = found
            if self._load(session, hit):
                return (*session.tokens, *rest)
            found = self._better(prompt, session.reusable(prompt), session.n_ctx)
        return tuple(prompt)

    def _better(
        self, prompt: Sequence[int], n_reusable: int, n_ctx: int
    ) -> tuple[Hit, list[int]] | None:
        """Return a file that saves more work than memory, and the tokens that follow it.

        With what a file hides, the prompt must still fit.
        """
        if n_reusable >= len(prompt) - 1:
            return None
        hit = self._disk.find(self._text(prompt))
        if hit is None or hit.entry.name in self._refused:
            return None
        rest, n_held = self._rest(prompt, len(hit.key)), hit.entry.header.n_tokens
        if rest is None or n_held <= n_reusable or n_held + len(rest) >= n_ctx:
            return None
        return hit, rest

    def prefill(
        self,
        session: Session,
        prompt: Sequence[int],
        prefix_length: PrefixLength | None,
        *,
        progress: Progress,
        cancelled: Cancelled,
    ) -> int | None:
        """Evaluate a prompt as far as it is worth saving on the way.

        Returns:
            Tokens that needed no evaluation; None if nothing was evaluated.

        Raises:
            Ds4Error: What `Session.sync` raises.
        """
        n_prompt, options = len(prompt), self._disk.options
        n_cached: int | None = None

        def report(n_done: int, _: int) -> None:
            progress(n_done, n_prompt)

        n_done = session.reusable(prompt)
        if may_store_cold(n_prompt, n_done, options):
            anchor = 0 if prefix_length is None else min(prefix_length(), n_prompt)
            if anchor < options.min_tokens:
                anchor = cold_anchor(prompt, (), (), options)
            n_cached = session.sync(prompt[:anchor], progress=report, cancelled=cancelled).n_cached
            self.save(session, Reason.COLD)
            n_done = anchor
        step = options.continued_step
        for n in range(n_done - n_done % step + step, n_prompt, step) if step else ():
            synced = session.sync(prompt[:n], progress=report, cancelled=cancelled)
            n_cached = synced.n_cached if n_cached is None else n_cached
            self.save(session, Reason.CONTINUED)
        return n_cached

    def grown(self, session: Session) -> None:
        """Save a session between two tokens of an answer, if it is time."""
        if should_store_continued(len(session.tokens), 0, self._disk.options):
            self.save(session, Reason.CONTINUED)

    def save(self, session: Session, reason: Reason) -> None:
        """Save a session as it is."""
        try:
            self._save(session, reason)
        except CancelledError:
            raise
        except Ds4Error as error:
            _log.warning("a session of %d tokens was not saved: %s", len(session.tokens), error)

    def _save(self, session: Session, reason: Reason) -> None:
        if len(session.tokens) < self._disk.options.min_tokens:
            return
        flags, key = Flag.NONE, self._text(session.tokens)
        spoken = self._exact_tokens.visible(session.tokens)
        if spoken is not None and reason in (Reason.EVICT, Reason.SHUTDOWN):
            tokens, seen = spoken
            session.sync(tokens)  # the last token of calls is sampled, but not evaluated
            visible = self._text(seen)
            if visible != self._text(tokens):
                flags = Flag.THINKING_VISIBLE
            key = visible
        checkpoint = Checkpoint(
            key=key,
            n_tokens=len(session.tokens),
            reason=reason,
            flags=flags,
            tool_map=self._tools.items_for(blocks_in(key.decode("utf-8", "replace"))),
        )
        self._disk.store(checkpoint, session.save)

    def _load(self, session: Session, hit: Hit) -> bool:
        loaded = self._disk.load(hit)
        if loaded is None:
            return False
        try:
            session.load(loaded.payload)
        except Ds4Error as error:
            # the file is whole: it may suit another cache type, or a route that works again
            _log.warning("%s: not loaded: %s; going on without", hit.entry.name, error)
            self._refused.add(hit.entry.name)
            return False
        if not self._is_what_it_says(session, loaded.header, hit.key):
            self._disk.reject(hit, "its text is not the one of its tokens")
            session.rewind(0)
            return False
        self._tools.restore(loaded.tool_map)
        return True

    def _is_what_it_says(self, session: Session, header: KvcHeader, key: bytes) -> bool:
        """Compare a loaded session with its file's header; a visible text says less than tokens."""
        if len(session.tokens) != header.n_tokens:
            return False
        is_visible = header.flags & (Flag.THINKING_VISIBLE | Flag.RESPONSES_VISIBLE)
        return bool(is_visible) or self._text(session.tokens) == key

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self._tokenizer.token_bytes(token, special=True) for token in tokens)

    def _rest(self, prompt: Sequence[int], n_bytes: int) -> list[int] | None:
        """Return the tokens of a prompt behind its first bytes; None if they cannot be told.

        A token across the cut is spelled by others, and only it: what stands behind keeps its
        tokens, so that no text of a user can become a control token.
        """
        across, n_spelled = b"", 0
        for n, token in enumerate(prompt):
            if n_spelled >= n_bytes and (text := _whole_text(across)) is not None:
                return [*self._tokenizer.encode(text, special=False), *prompt[n:]]
            piece = self._tokenizer.token_bytes(token, special=True)
            n_spelled += len(piece)
            across += piece[max(0, len(piece) - max(0, n_spelled - n_bytes)) :]
        return None


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
