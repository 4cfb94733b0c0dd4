"""Grammars that a reply must follow, over the tokens of one model.

Owns: the vocabulary as `llguidance` wants it, the limits that keep a hostile schema from taking
the server with it, and the sentences that clients read. Refuses to know: sampling, sessions, HTTP.
Invariant: whatever a constraint allowed, token by token until it may end, is a text of its grammar.

What the library bounds itself (measured): expressions, states, items per step, the size of a
grammar. What it does not, and is bounded here: it recurses along chains of references, so compiling
runs on a stack that no text of the largest size can fill; `multipleOf` becomes an automaton of that
many states, so there is a largest one; and the length of the text, since some steps are quadratic.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Final, Protocol, TypeVar

import llguidance
import numpy as np
import numpy.typing as npt

from ds4py.errors import RequestError
from ds4py.generation.sampling import F32

MAX_DATA_CHARS: Final = 128 << 10
"""Longest JSON schema or list of choices."""

MAX_PATTERN_CHARS: Final = 32 << 10
"""Longest regular expression or Lark grammar."""

MAX_MULTIPLE: Final = 20_000
"""Largest product of the significant digits of all different `multipleOf` of a schema."""

MAX_MEETING: Final = 12
"""Most patterns of which one text may have to satisfy several at once."""

COMPILE_SECONDS: Final = 20.0
"""After this time a grammar is given up; honest ones take milliseconds."""

_STACK_BYTES: Final = 128 << 20  # address space, not memory; chains of 128 KiB of text need 30 MiB
_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,16}"  # bounded, or a model may indent for ever
_MAX_LEXER_STATES: Final = 50_000  # 1 to 2 KB each
_MAX_REASON_CHARS: Final = 300
_JSON_OBJECT: Final = '{"type":"object"}'

T = TypeVar("T")


class GrammarKind(StrEnum):
    """How a client says what a reply may be."""

    JSON_OBJECT = "JSON object"
    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    LARK = "Lark grammar"
    CHOICE = "choice"


class GrammarVocabulary(Protocol):
    """What is asked of a tokenizer; `ds4py.text.tokenizer.tokenizer.Tokenizer` answers it."""

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end a reply."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Spelling to id of the control tokens."""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return what a token adds to a text, or how a control token is spelled."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text."""


class GrammarSource:
    """Makes constraints for replies of one model; any number of threads may use it.

    Args:
        vocabulary: Of the model. It is read when the first grammar is compiled, which takes about
            a second for each 100 000 tokens.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._built: llguidance.LLTokenizer | None = None

    def compile(
        self,
        kind: GrammarKind,
        text: str = "",
        *,
        lenient: bool = False,
        param: str = "response_format",
    ) -> Constraint:
        """Return a fresh constraint for one reply.

        May take a second for a large grammar, most of it without the interpreter's lock.

        Args:
            kind: What `text` is.
            text: The schema as JSON text, a Rust regular expression, a grammar in llguidance's
                Lark dialect, or a JSON list of the strings to choose from; nothing for an object.
            lenient: Ignore what cannot be enforced of a JSON schema instead of refusing it.
            param: Request field that errors name.

        Raises:
            RequestError: The text is too long, malformed, unsatisfiable, or more than can be
                enforced.
        """
        limit = MAX_PATTERN_CHARS if kind in _PATTERNS else MAX_DATA_CHARS
        if len(text) > limit:
            raise RequestError(
                f"{kind}: got {len(text)} characters, expected at most {limit}", param=param
            )
        tokenizer = self._tokenizer()
        try:
            grammar = _written(kind, text, lenient=lenient)
            matcher = _on_a_deep_stack(lambda: _matcher(tokenizer, grammar))
        except RecursionError as error:
            raise RequestError(_sentence(kind, "nested too deeply"), param=param) from error
        except (ValueError, TimeoutError) as error:
            raise RequestError(_sentence(kind, str(error)), param=param) from error
        return Constraint(matcher, self._vocabulary, kind=kind, param=param)

    def _tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._built is None:
                self._built = _TokenPieces(self._vocabulary).tokenizer
            return self._built


class Constraint:
    """What one reply may continue with; used by one thread at a time.

    It allows everything until `start` is called, so that reasoning stays free. The first token
    behind `start` begins the constrained text.

    Args:
        matcher: Fresh, of a satisfiable grammar.
        vocabulary: The one that the matcher was built for.
        kind: For errors.
        param: Request field that errors name.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: GrammarVocabulary,
        *,
        kind: GrammarKind,
        param: str,
    ) -> None:
        self._matcher = matcher
        self._n_vocab = vocabulary.n_vocab
        self._eos_ids = sorted(vocabulary.eos_ids)
        self._kind = kind
        self._param = param
        self._started = False
        self._ended = False

    def start(self) -> None:
        """Constrain every further token; idempotent."""
        self._started = True

    @property
    def may_end(self) -> bool:
        """Whether the reply may end here: the grammar is satisfied, or does not hold yet."""
        return not self._started or self._ended or self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but its end can follow."""
        return self._started and (self._ended or (self.may_end and self._matcher.is_stopped()))

    def mask(self, logits: F32) -> F32:
        """Return the logits with -inf for every token that must not come next.

        Args:
            logits: `f32[V]`, only read; handed back itself when everything is allowed.

        Raises:
            RequestError: No token of the vocabulary can continue the text.
        """
        if not self._started:
            return logits
        allowed = self._allowed(len(logits))
        if not allowed.any():
            raise self._dead_end()
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        """Take the token that was chosen.

        Raises:
            RequestError: The grammar does not allow it.
        """
        if not self._started:
            return
        if token in self._eos_ids and self.may_end:
            self._ended = True
        elif self.finished or not self._matcher.consume_token(token):
            raise self._dead_end()

    def _allowed(self, n_logits: int) -> npt.NDArray[np.bool_]:
        allowed = np.zeros(n_logits, np.bool_)
        n_known = min(n_logits, self._n_vocab)
        if not self.finished:
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                return allowed
            allowed[:n_known] = np.unpackbits(packed, count=n_known, bitorder="little")
        if self.may_end:
            allowed[[id_ for id_ in self._eos_ids if id_ < n_known]] = True
        return allowed

    def _dead_end(self) -> RequestError:
        reason = _reason(self._matcher.get_error())
        because = f": {reason}" if reason else ""
        return RequestError(
            f"{self._kind}: no token of the model can continue the reply{because}; "
            "expected a grammar that the model can spell, a simpler one may do",
            param=self._param,
        )


class _TokenPieces:
    """The vocabulary in the words of `llguidance.TokenizerWrapper`.

    Calling it cuts a text that the grammar forces, so that the model sees it as it learnt it.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._encode = vocabulary.encode
        special = set(vocabulary.special_ids.values()) | set(vocabulary.eos_ids)
        self.tokens = [
            vocabulary.token_bytes(token, special=token in special)
            for token in range(vocabulary.n_vocab)
        ]
        if not vocabulary.eos_ids:
            self.tokens.append(b"")  # the library must have an end; no logit belongs to this one
        self.eos_token_id = min(vocabulary.eos_ids, default=vocabulary.n_vocab)
        self.bos_token_id = None
        self.special_token_ids = sorted(special | {self.eos_token_id})
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), slices=llguidance.LLTokenizer.json_slices()
        )

    def __call__(self, text: str) -> list[int]:
        """Return ids that spell exactly `text`."""
        if not isinstance(text, str):
            raise TypeError("expected a string")  # the wrapper finds out so what to pass
        ids = self._encode(text, special=False)
        if b"".join(self.tokens[token] for token in ids) == text.encode():
            return ids
        return self.tokenizer.greedy_tokenize(text)  # a codec that adds a space or normalizes


_PATTERNS: Final = (GrammarKind.REGEX, GrammarKind.LARK)


def _written(kind: GrammarKind, text: str, *, lenient: bool) -> str:
    """Return the grammar as the library reads it.

    Raises:
        ValueError: The text is not what its kind says.
    """
    match kind:
        case GrammarKind.JSON_OBJECT:
            return _json_grammar(_JSON_OBJECT, lenient=False)
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(text)
            _check_multiples(schema)
            _check_patterns(schema)
            return _json_grammar(text, lenient=lenient)
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(text)
        case GrammarKind.LARK:
            if "%json" in text:
                raise ValueError("%json is not supported, expected plain rules or a JSON schema")
            if text.count("&") > MAX_MEETING:
                raise ValueError(f"more than {MAX_MEETING} intersections, expected at most as many")
            return llguidance.LLMatcher.grammar_from_lark(text)
        case GrammarKind.CHOICE:
            return llguidance.LLMatcher.grammar_from_lark(_choice(json.loads(text)))


def _json_grammar(schema: str, *, lenient: bool) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "item_separator": ",",
            "key_separator": ":",
            "whitespace_pattern": _WHITESPACE,
            "lenient": lenient,
        },
    )


def _choice(options: object) -> str:
    """Return the Lark grammar of one of some literal texts."""
    if not isinstance(options, list) or not options:
        raise ValueError("expected a list of at least one string")
    if not all(isinstance(option, str) for option in options):
        raise ValueError("expected only strings")
    return "start: " + " | ".join(json.dumps(option) for option in options)


def _check_multiples(schema: object) -> None:
    """Refuse divisors whose automaton would be too large, also combined by `allOf`."""
    digits = {_significant(value) for value in _values_of("multipleOf", schema)}
    product = math.prod(digits)
    if product > MAX_MULTIPLE:
        raise ValueError(
            f"the values of multipleOf have {product} as the product of their significant digits, "
            f"expected at most {MAX_MULTIPLE}"
        )


def _check_patterns(schema: object) -> None:
    """Refuse many patterns that one text may have to satisfy: their product has no bound.

    Which of them meet is for the library to say; that some may is told by `allOf` and `$ref`.
    """
    meet = any(True for key in ("allOf", "$ref") for _ in _values_of(key, schema))
    n_patterns = sum(1 for _ in _values_of("pattern", schema))
    if meet and n_patterns > MAX_MEETING:
        raise ValueError(
            f"{n_patterns} patterns in a schema with allOf or $ref, expected at most {MAX_MEETING}"
        )


def _significant(value: object) -> int:
    """Return a number's digits without point, sign and zeros at the ends: 5 for 0.05 and 500."""
    if not isinstance(value, int | float) or not math.isfinite(value) or not value:
        return 1  # the library has its own words for those
    return int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))


def _values_of(key: str, schema: object) -> Iterator[object]:
    """Yield every value that stands under a key, however deep."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if key in node:
                yield node[key]
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds grammars that no text satisfies
    error = matcher.get_error()
    if error.startswith("panic"):
        raise RuntimeError(error)  # a bug, for the log rather than for the client
    if error:
        raise ValueError(error)
    return matcher


def _on_a_deep_stack(function: Callable[[], T]) -> T:
    """Call a function on a thread of its own, and wait for it.

    Raises:
        TimeoutError: It takes too long; the thread is left behind.
    """
    _ABANDONED[:] = [left for left in _ABANDONED if left.is_alive()]
    if len(_ABANDONED) >= _MAX_ABANDONED:
        raise TimeoutError("earlier ones that were too complex still take the time; try later")
    results: list[T] = []
    errors: list[Exception] = []

    def body() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)

    thread = threading.Thread(target=body, name="grammar", daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(COMPILE_SECONDS)
    if thread.is_alive():
        _ABANDONED.append(thread)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"too complex: not compiled within {COMPILE_SECONDS:g} seconds")
    return results[0]


_STACK_SIZE: Final = threading.Lock()  # it is a setting of the whole process
_ABANDONED: Final[list[threading.Thread]] = []
_MAX_ABANDONED: Final = 2
"""Compiles beyond their time, which nothing can end, before no other one is begun."""


def _sentence(kind: GrammarKind, error: str) -> str:
    return f"{kind}: cannot be enforced: {_reason(error) or 'nothing can follow its rules'}"


def _reason(error: str) -> str:
    """Return the library's words on one line, without its dumps of internal state."""
    words = " ".join(error.partition("\n<")[0].split())
    words = words.replace("NoExtensionBias", "no text satisfies it")
    return words if len(words) <= _MAX_REASON_CHARS else f"{words[:_MAX_REASON_CHARS]}..."
