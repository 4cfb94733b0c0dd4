"""Whether a slice can evaluate what it is asked for.

Owns: the checks of a request before it runs. Refuses to know: devices, caches. Invariant: what
passes here cannot make the model read or write beyond its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4py.activations import HiddenBatch
from ds4py.contracts import ForwardRequest, ModelCard, OutputKind
from ds4py.errors import CapacityError, ModelError
from ds4py.layer_range import LayerRange


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """The checks of one slice.

    Args:
        card: The model.
        layers: Of the slice.
        n_ctx: Tokens that one session can hold.
        has_head: Whether it has the output head.
    """

    card: ModelCard
    layers: LayerRange
    n_ctx: int
    has_head: bool

    def check(self, request: ForwardRequest, held: int) -> None:
        """Refuse what cannot be evaluated.

        Args:
            request: The span.
            held: Tokens that its session holds.

        Raises:
            ModelError: It does not suit the slice or its session.
            CapacityError: It does not fit into the context.
        """
        n_tokens = len(request.tokens)
        if n_tokens < 1:
            raise ModelError("span", got="no tokens", expected="at least one")
        self._check_input(request)
        if request.output_kind is OutputKind.LOGITS and not self.has_head:
            raise ModelError("logits", got=f"layers {self.layers}", expected="the output head")
        if not 1 <= request.n_logits <= n_tokens:
            raise ModelError("rows with logits", got=request.n_logits, expected=f"1 to {n_tokens}")
        expected = 0 if request.reset else held
        if request.pos0 != expected:
            raise ModelError(
                f"position of session {request.session}", got=request.pos0, expected=expected
            )
        if request.pos0 + n_tokens > self.n_ctx:
            raise CapacityError(
                "context of the session", needed=request.pos0 + n_tokens, available=self.n_ctx
            )

    def _check_input(self, request: ForwardRequest) -> None:
        hidden = request.hidden
        if (hidden is None) != (self.layers.start == 0):
            got, expected = ("tokens only", "hidden states")[:: 1 if hidden is None else -1]
            raise ModelError(f"input of layers {self.layers}", got=got, expected=expected)
        if hidden is not None:
            self.check_width(hidden)
            if hidden.rows != len(request.tokens):
                raise ModelError(
                    "hidden state",
                    got=f"{hidden.rows} rows",
                    expected=f"{len(request.tokens)}, one for each token",
                )
        n_vocab = self.card.n_vocab
        if not (min(request.tokens) >= 0 and max(request.tokens) < n_vocab):
            bad = next(token for token in request.tokens if not 0 <= token < n_vocab)
            raise ModelError("token id", got=bad, expected=f"0 to {n_vocab - 1}")

    def check_row(self, row: HiddenBatch) -> None:
        """Refuse hidden states of which no logits can be made."""
        if not self.has_head:
            raise ModelError(
                "logits", got="a slice without the output head", expected="the last slice"
            )
        if row.rows < 1:
            raise ModelError("hidden state", got="no rows", expected="at least one")
        self.check_width(row)

    def check_width(self, batch: HiddenBatch) -> None:
        """Refuse hidden states of another width."""
        width = self.card.hidden_width
        if batch.width != width:
            raise ModelError("hidden state", got=f"{batch.width} values a token", expected=width)
