"""Constraints: what they allow is the grammar, whatever the tokens are cut like."""

import json
import re
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import RequestError
from ds4py.generation import grammar
from ds4py.generation.grammar import Constraint, GrammarKind, GrammarSource, GrammarVocabulary
from tests.unit.generation.toys import (
    EOS,
    MARK,
    N_VOCAB,
    OTHER_EOS,
    PIECES,
    Toy,
    allowed,
    noise,
)
from tests.unit.server.support import text_stack

TOY = Toy()
SOURCE = GrammarSource(TOY)
REAL = GrammarSource(text_stack().tokenizer)  # a byte-level BPE with merges
ENDINGS = [b'"', b"}", b"]", b","]  # in this order: brackets are characters in a string
DEADLINE = 10.0


def started(kind: GrammarKind, text: str = "", source: GrammarSource = SOURCE) -> Constraint:
    constraint = source.compile(kind, text)
    constraint.start()
    return constraint


def write(constraint: Constraint, vocabulary: GrammarVocabulary, seed: int) -> str:
    """Follow random logits; later those that close what is open, since a string may be endless."""
    rng = np.random.default_rng(seed)
    spelling = [vocabulary.token_bytes(token) for token in range(vocabulary.n_vocab)]
    closing = np.array(
        [9.0 - ENDINGS.index(s) if s in ENDINGS else 0 for s in spelling], np.float32
    )
    closing[list(vocabulary.eos_ids)] = 20
    text = b""
    for n_tokens in range(400):
        if constraint.finished:
            break
        logits = noise(rng, vocabulary.n_vocab) if n_tokens < 40 else closing
        token = int(constraint.mask(logits).argmax())
        constraint.accept(token)
        text += spelling[token]
    assert constraint.finished
    return text.decode()  # never half a character


def conforms(value: object, schema: dict[str, object]) -> bool:
    """Whether a value is valid under the keywords that `SCHEMAS` uses."""
    if "anyOf" in schema:
        return any(conforms(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == option and type(value) is type(option) for option in schema["enum"])
    match schema["type"]:
        case "object":
            return isinstance(value, dict) and _conforming_object(value, schema)
        case "array":
            items = schema["items"]
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(conforms(item, items) for item in value)
            )
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            bounded = isinstance(value, int) and schema["minimum"] <= value <= schema["maximum"]
            return bounded and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case unknown:
            raise AssertionError(unknown)


def _conforming_object(value: dict[str, object], schema: dict[str, object]) -> bool:
    properties = schema["properties"]
    return (
        set(schema["required"]) <= set(value) <= set(properties)
        and list(value) == [name for name in properties if name in value]  # as the schema orders
        and all(conforms(item, properties[name]) for name, item in value.items())
    )


WORDS = st.text('aé日"\\ \n', max_size=4)
LEAVES = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
        st.integers(-200, 200),
        st.integers(-200, 200),
    ),
    st.sampled_from([{"type": "number"}, {"type": "boolean"}, {"type": "null"}]),
    st.builds(
        lambda options: {"enum": options},
        st.lists(WORDS | st.integers(-9, 9) | st.none() | st.booleans(), min_size=1, max_size=3),
    ),
)


def objects(values: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(WORDS, values, max_size=3).flatmap(
        lambda properties: st.builds(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            },
            st.lists(st.sampled_from(sorted(properties)), unique=True)
            if properties
            else st.just([]),
        )
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda item, n: {"type": "array", "items": item, "minItems": n, "maxItems": n + 2},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@given(SCHEMAS, st.integers(0, 2**32))
def test_what_is_written_under_a_schema_is_valid(schema: dict[str, object], seed: int) -> None:
    for vocabulary, source in ((TOY, SOURCE), (text_stack().tokenizer, REAL)):
        constraint = started(GrammarKind.JSON_SCHEMA, json.dumps(schema), source)
        text = write(constraint, vocabulary, seed)
        assert conforms(json.loads(text), schema), text


@given(st.integers(0, 2**32))
def test_any_object_is_a_json_object(seed: int) -> None:
    assert isinstance(json.loads(write(started(GrammarKind.JSON_OBJECT), TOY, seed)), dict)


@given(st.lists(st.text("abé日", max_size=4), min_size=1, max_size=5), st.integers(0, 2**32))
def test_a_choice_allows_exactly_its_texts(choices: list[str], seed: int) -> None:
    constraint = started(GrammarKind.CHOICE, json.dumps(choices))
    rng = np.random.default_rng(seed)
    texts = [choice.encode() for choice in choices]
    text = b""
    while not constraint.finished:
        fits = {
            token
            for token in range(MARK)
            if PIECES[token] and any(t.startswith(text + PIECES[token]) for t in texts)
        }
        assert constraint.may_end == (text in texts)
        ends = {EOS, OTHER_EOS} if text in texts else set()
        told = allowed(constraint)
        assert told == fits | ends or (len(told) == 1 and told < fits)  # one, when it is certain
        token = int(constraint.mask(noise(rng)).argmax())
        constraint.accept(token)
        text += TOY.token_bytes(token)
    assert text in texts


def test_a_token_is_allowed_exactly_if_it_is_accepted() -> None:
    def behind(text: bytes) -> Constraint:
        constraint = started(GrammarKind.REGEX, "(a|b|é|日)+|x[0-9]{2}")
        for byte in text:
            constraint.accept(byte)
        return constraint

    for text in (b"", b"a", b"x", b"b\xc3"):
        told = allowed(behind(text))
        for token in {*range(256, N_VOCAB), *"abx019 é日".encode(), 0, 255}:
            try:
                behind(text).accept(token)
            except RequestError:
                assert token not in told
            else:
                assert token in told or PIECES[token] in {PIECES[one] for one in told}


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (GrammarKind.REGEX, r"\d{3}-[a-c]+", r"\d{3}-[a-c]+"),
        (GrammarKind.LARK, 'start: "x" (A | "y")\nA: /[0-9]{2}/', r"x([0-9]{2}|y)"),
        (GrammarKind.CHOICE, '["yes", "no", "über \\"quoted\\""]', r'yes|no|über "quoted"'),
    ],
)
def test_other_kinds_are_followed(kind: GrammarKind, text: str, expected: str) -> None:
    for seed in range(20):
        assert re.fullmatch(expected, write(started(kind, text), TOY, seed))


def test_json_may_be_compact_or_indented_but_not_endlessly() -> None:
    for text in (b'{"a":[1,2]}', b'{\n  "a": [\n    1, 2\n  ]\n}', b'{"a" : 1}'):
        constraint = started(GrammarKind.JSON_OBJECT)
        for byte in text:
            constraint.accept(byte)
        assert constraint.finished
    constraint = started(GrammarKind.JSON_OBJECT)
    for byte in b"{" + b" " * 16:
        constraint.accept(byte)
    assert ord(" ") not in allowed(constraint)


def test_forced_text_is_cut_as_the_tokenizer_cuts_it() -> None:
    stack = text_stack().tokenizer
    constraint = started(GrammarKind.CHOICE, '["hello there"]', REAL)
    written = []
    while not constraint.finished:
        written.append(int(constraint.mask(np.zeros(stack.n_vocab, np.float32)).argmax()))
        constraint.accept(written[-1])
    assert written == stack.encode("hello there", special=False)


def test_a_tokenizer_that_changes_texts_forces_the_right_one() -> None:
    source = GrammarSource(Toy(adds_space=True))
    assert write(started(GrammarKind.CHOICE, '["hello"]', source), TOY, 1) == "hello"


def test_nothing_is_constrained_before_the_start() -> None:
    constraint = SOURCE.compile(GrammarKind.CHOICE, '["ab"]')
    logits = np.zeros(N_VOCAB, np.float32)
    assert constraint.mask(logits) is logits
    for token in (ord("x"), MARK, EOS):
        constraint.accept(token)
    assert constraint.may_end
    assert not constraint.finished
    constraint.start()
    assert not constraint.may_end
    assert write(constraint, TOY, 1) == "ab"


def test_an_end_token_ends_a_text_that_could_go_on() -> None:
    constraint = started(GrammarKind.REGEX, "[ab]+")
    assert not allowed(constraint) & {EOS, OTHER_EOS}
    constraint.accept(ord("a"))
    assert {EOS, OTHER_EOS, ord("b")} <= allowed(constraint)
    assert not constraint.finished
    constraint.accept(OTHER_EOS)
    assert constraint.finished
    assert allowed(constraint) == {EOS, OTHER_EOS}
    with pytest.raises(RequestError):
        constraint.accept(ord("b"))


def test_an_end_token_before_the_end_is_refused() -> None:
    constraint = started(GrammarKind.CHOICE, '["ab"]')
    with pytest.raises(RequestError, match="choice: no token of the model can continue"):
        constraint.accept(EOS)


def test_a_vocabulary_without_an_end_still_finishes_a_text() -> None:
    constraint = started(GrammarKind.REGEX, "a", GrammarSource(Toy(eos_ids=())))
    assert allowed(constraint, N_VOCAB + 5) <= {ord("a")}
    constraint.accept(ord("a"))
    assert constraint.finished
    with pytest.raises(RequestError):  # rather than a token that has no text
        constraint.mask(np.zeros(N_VOCAB + 5, np.float32))


@pytest.mark.parametrize("n_logits", [N_VOCAB + 9, 200])
def test_logits_may_be_more_or_fewer_than_tokens(n_logits: int) -> None:
    constraint = started(GrammarKind.REGEX, "[a-z]+")
    logits = np.linspace(0, 1, n_logits, dtype=np.float32)
    logits.flags.writeable = False
    masked = constraint.mask(logits)
    assert masked.dtype == np.float32
    kept = np.flatnonzero(np.isfinite(masked))
    assert set(range(ord("a"), ord("z") + 1)) <= set(kept.tolist())
    assert kept.max() < min(n_logits, MARK)
    assert (masked[kept] == logits[kept]).all()


def without(*gone: bytes) -> GrammarSource:
    return GrammarSource(Toy([b"" if piece in gone else piece for piece in PIECES]))


def test_a_text_that_the_tokens_can_not_spell_is_refused_when_it_comes_to_that() -> None:
    source = without(b"z")
    with pytest.raises(RequestError, match="cannot be enforced") as caught:
        source.compile(GrammarKind.CHOICE, '["z"]', param="guided_choice")
    assert caught.value.param == "guided_choice"
    constraint = source.compile(GrammarKind.REGEX, "[ab][xz]", param="guided_regex")
    constraint.start()
    constraint.accept(ord("a"))
    assert allowed(constraint) == {ord("x")}
    constraint = source.compile(GrammarKind.REGEX, "[ab]z", param="guided_regex")
    constraint.start()
    constraint.accept(ord("a"))
    with pytest.raises(RequestError, match="no token of the model") as caught:
        constraint.mask(np.zeros(N_VOCAB, np.float32))
    assert caught.value.param == "guided_regex"


S, R, L, C = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK, GrammarKind.CHOICE
CHAIN = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(1900)}
MODULI = [{"type": "integer", "multipleOf": m} for m in (997, 991)]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (S, "{", "JSON schema: cannot be enforced: Expecting"),
        (S, "[]", "object"),
        (S, "{}\n}", "Extra data"),
        (S, "[" * 60_000, "nested too deeply"),
        (S, '{"properties":{"a":' * 2000 + "{}" + "}}" * 2000, "nested too deeply"),
        (S, '{"type": "foo"}', "foo"),
        (S, '{"not": {}}', '"not"'),
        (S, '{"$ref": "#"}', "no text satisfies it"),
        (S, '{"$ref": "https://localhost/x"}', "localhost"),
        (S, '{"type": "string", "minLength": 5, "maxLength": 3}', "minLength"),
        (S, '{"type": "string", "format": "secret"}', "secret"),
        (S, '{"type": "integer", "multipleOf": 9999991}', "multipleOf have 9999991"),
        (S, json.dumps({"allOf": MODULI}), "expected at most 20000"),
        (S, json.dumps({"enum": ["x" * 200_000]}), "got 200014 characters, expected at most"),
        (R, "(a", "unclosed group"),
        (R, "a" * 40_000, "regular expression: got 40000 characters"),
        (R, "(" * 16_000 + ")" * 16_000, "invalid regex"),
        (L, "start: foo", "foo"),
        (L, "start: %json {}", "%json"),
        (L, "start: " + "(" * 16_000 + '"a"' + ")" * 16_000, "nested"),
        (L, "start: T\nT: /(.{9973})*/ & /(.{9967})*/ & /.{5,}/", "fuel exhausted"),
        (C, "[]", "at least one string"),
        (C, '["a", 1]', "only strings"),
        (C, '{"a": 1}', "list"),
    ],
)
def test_what_can_not_be_enforced_is_one_clear_sentence(
    kind: GrammarKind, text: str, says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SOURCE.compile(kind, text, param="text.format")
    error = caught.value
    assert says in error.message
    assert error.message.startswith(kind.value)
    assert "\n" not in error.message
    assert len(error.message) < 400
    assert (error.status, error.param) == (400, "text.format")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (S, json.dumps({"$defs": CHAIN | {"a1900": {}}, "$ref": "#/$defs/a0"})),
        (L, "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(1900)) + '\na1900: "a"'),
        (L, "start: A0\n" + "\n".join(f"A{i}: A{i + 1}" for i in range(1900)) + '\nA1900: "a"'),
    ],
)
def test_the_longest_chains_of_references_fit_the_stack(kind: GrammarKind, text: str) -> None:
    assert allowed(started(kind, text))


def test_divisors_that_money_and_clocks_use_are_enforced() -> None:
    schema = {"type": "number", "multipleOf": 0.05, "minimum": 0.1, "maximum": 0.2}
    texts = {write(started(S, json.dumps(schema)), TOY, seed) for seed in range(10)}
    assert {round(float(text) / 0.05) for text in texts} <= {2, 3, 4}
    numbers = [0.01, 5, 15, 60, 1000]
    SOURCE.compile(S, json.dumps({"anyOf": [{"type": "number", "multipleOf": m} for m in numbers]}))


def test_leniency_ignores_what_can_not_be_enforced() -> None:
    schema = '{"type": "string", "format": "secret", "maxLength": 2}'
    constraint = SOURCE.compile(S, schema, lenient=True)
    constraint.start()
    assert len(json.loads(write(constraint, TOY, 3))) <= 2


def test_a_schema_can_not_widen_the_whitespace() -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": "x*", "item_separator": ";"}}
    constraint = started(S, json.dumps(schema))
    for byte in b"[1":
        constraint.accept(byte)
    told = allowed(constraint)
    assert {ord(","), ord(" ")} < told
    assert not {ord("x"), ord(";")} & told


def in_threads(n_threads: int, work: Callable[[], object]) -> list[object]:
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(work()), daemon=True)
        for _ in range(n_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return results


def test_the_vocabulary_is_read_once_and_only_when_needed() -> None:
    toy = Toy()
    source = GrammarSource(toy)
    assert toy.n_reads == 0
    texts = in_threads(4, lambda: write(started(GrammarKind.CHOICE, '["ab"]', source), TOY, 1))
    assert texts == ["ab"] * 4
    assert toy.n_reads == N_VOCAB


def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.01)
    released = threading.Event()
    monkeypatch.setattr(grammar, "_matcher", lambda *_: released.wait(DEADLINE))
    with pytest.raises(RequestError, match="too complex"):
        SOURCE.compile(GrammarKind.JSON_OBJECT)
    released.set()


def test_compiling_leaves_the_stacks_of_other_threads_alone() -> None:
    before = threading.stack_size(1 << 20)
    try:
        SOURCE.compile(GrammarKind.JSON_OBJECT)
        assert threading.stack_size() == 1 << 20
    finally:
        threading.stack_size(before)


def test_patterns_that_one_text_may_have_to_satisfy_together_are_few() -> None:
    many = [{"pattern": f"a{n}b*[c-{chr(100 + n)}]+"} for n in range(grammar.MAX_MEETING + 1)]
    met = json.dumps({"type": "string", "allOf": many})
    with pytest.raises(RequestError, match="13 patterns in a schema with allOf"):
        REAL.compile(GrammarKind.JSON_SCHEMA, met)
    apart = {f"p{n}": {"type": "string", **one} for n, one in enumerate(many)}
    REAL.compile(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": apart}))
    with pytest.raises(RequestError, match="intersections"):
        REAL.compile(GrammarKind.LARK, "start: A\nA: " + " & ".join(["/a+/"] * 20))
