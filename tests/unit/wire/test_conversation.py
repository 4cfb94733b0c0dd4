"""Who may say what when: against a grammar written down in another way, from both sides."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.conversation import ProtocolState, Role, Side, State
from ds4py.wire.frames import EXT_HELLO, ExtType, FrameType

# One letter a frame. The driver speaks: W work, S save request, L load begin, c chunk, X extension
# hello, e error, A alive, C cancel, P drop, G hop lost. The server speaks: R result, B begin, N
# refused begin, k chunk, D done, H hello, x extension hello, f error, a alive.
LETTERS = {
    "W": (Side.DRIVER, FrameType.WORK),
    "S": (Side.DRIVER, FrameType.SNAPSHOT_SAVE_REQ),
    "L": (Side.DRIVER, FrameType.SNAPSHOT_LOAD_BEGIN),
    "c": (Side.DRIVER, FrameType.SNAPSHOT_CHUNK),
    "X": (Side.DRIVER, EXT_HELLO),
    "e": (Side.DRIVER, FrameType.ERROR),
    "R": (Side.SERVER, FrameType.RESULT),
    "B": (Side.SERVER, FrameType.SNAPSHOT_BEGIN),
    "N": (Side.SERVER, FrameType.SNAPSHOT_BEGIN),
    "k": (Side.SERVER, FrameType.SNAPSHOT_CHUNK),
    "D": (Side.SERVER, FrameType.SNAPSHOT_DONE),
    "H": (Side.SERVER, FrameType.HELLO),
    "x": (Side.SERVER, EXT_HELLO),
    "f": (Side.SERVER, FrameType.ERROR),
    "A": (Side.DRIVER, ExtType.ALIVE),
    "C": (Side.DRIVER, ExtType.CANCEL),
    "P": (Side.DRIVER, ExtType.DROP),
    "G": (Side.DRIVER, ExtType.HOP_LOST),
    "a": (Side.SERVER, ExtType.ALIVE),
    "v": (Side.SERVER, ExtType.CANCEL),
    "?": (Side.SERVER, 77),
    "!": (Side.DRIVER, 77),
}
_SERVING = "(?:W|R|SR*N|SR*Bk*D|L[cR]*D)*"
_OPEN_END = "(?:SR*(?:Bk*)?|L[cR]*)?"  # a conversation may stop in the middle of a transfer
_SERVED = _SERVING + _OPEN_END
CONTROL = re.compile(f"(?:(?:H|xX){_SERVED}|x?)[ef]?")
DATA = re.compile(f"(?:(?:Xx)?{_SERVED}|X)[ef]?")
NOTICES = "ACPGa"
letters = st.text(st.sampled_from("WWRRSLcXeBNkDHxfACPGav?!"), max_size=8)
legal = st.from_regex(CONTROL, fullmatch=True) | st.from_regex(DATA, fullmatch=True)
extended_tail = st.lists(
    st.sampled_from(["W", "R", "SN", "SB", "k", "D", "L", "c"]) | st.sampled_from(NOTICES)
).map("".join)
extended = st.sampled_from(["xX", "Xx"]).flatmap(lambda hellos: extended_tail.map(hellos.__add__))


def without_notices(text):
    """The text without the notices that may stand in it: after both hellos, before an error."""
    if text[:2] not in {"xX", "Xx"}:
        return text
    said, error, rest = re.fullmatch("(..[^ef]*)([ef]?)(.*)", text).groups()
    return re.sub(f"[{NOTICES}]", "", said) + error + rest


def grammar_allows(text, grammar):
    text = without_notices(text)
    answered = all(text[:n].count("R") <= text[:n].count("W") for n in range(len(text) + 1))
    return answered and grammar.fullmatch(text) is not None


def step(conversation, us, letter):
    side, frame_type = LETTERS[letter]
    move = conversation.sent if side is us else conversation.received
    move(frame_type, refused=letter == "N")


@given(letters | legal | extended, st.booleans())
@example("HWSRNR", True)
@example("SBkR", False)
@example("Hf?", True)
@example("LRcD", False)
@example("WLRcDS", False)
@example("xXWCaRAPG", True)
@example("XxLcAcGD", False)
@example("XxSBakaDa", False)
@example("HA", True)
@example("XAx", False)
@example("Xxv", False)
@example("XxfA", False)
def test_both_sides_accept_exactly_what_the_grammar_says(text, control):
    grammar = CONTROL if control else DATA
    driver_role = Role.COORDINATOR_CONTROL if control else Role.DATA_DRIVER
    server_role = Role.WORKER_CONTROL if control else Role.DATA_SERVER
    ends = [(ProtocolState(driver_role), Side.DRIVER), (ProtocolState(server_role), Side.SERVER)]
    for n, letter in enumerate(text):
        sender = LETTERS[letter][0]
        if grammar_allows(text[: n + 1], grammar):
            for end, us in ends:
                step(end, us, letter)
            continue
        for end, us in ends:
            before = end.state
            error = LocalProtocolError if sender is us else RemoteProtocolError
            with pytest.raises(error):
                step(end, us, letter)
            assert end.state is before
        return


def run(role, text):
    conversation = ProtocolState(role)
    us = role.value[0]
    for letter in text:
        step(conversation, us, letter)
    return conversation


def remote_kind(role, text, last):
    conversation = run(role, text)
    with pytest.raises(RemoteProtocolError) as caught:
        step(conversation, role.value[0], last)
    return caught.value.kind


def test_a_first_frame_that_introduces_nobody_has_its_own_class():
    assert remote_kind(Role.COORDINATOR_CONTROL, "", "R") == "H-TYPE"


def test_an_answer_that_nobody_asked_for_has_its_own_class():
    assert remote_kind(Role.COORDINATOR_CONTROL, "HWR", "R") == "R-REQUEST"


@pytest.mark.parametrize("letter", ["!", "X", "c"])
def test_anything_else_that_a_worker_does_not_serve_is_an_unexpected_type(letter):
    assert remote_kind(Role.WORKER_CONTROL, "HWR", letter) == "F-TYPE"


def test_the_text_names_frame_and_state():
    with pytest.raises(RemoteProtocolError, match="HELLO while the connection is serving"):
        run(Role.COORDINATOR_CONTROL, "HH")


def test_extended_peers_serve_after_one_hello_each():
    assert run(Role.COORDINATOR_CONTROL, "xXWR").state is State.SERVING
    assert run(Role.DATA_SERVER, "XxWR").state is State.SERVING


def test_a_plain_worker_answers_the_extension_hello_with_an_error():
    assert run(Role.DATA_DRIVER, "Xf").state is State.CLOSED
