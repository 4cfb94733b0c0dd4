"""Who may send which frame when: one table for both sides of a connection.

Owns: the legal orders of frames (docs/spec/wire-protocol.md#reading-rules, #serving,
#snapshot-transport, and those between ds4py peers). Refuses to know: bodies, sockets. Invariant:
both sides obey the same table; a frame that it does not list is our bug when we are about to send
it (`LocalProtocolError`) and the peer's when it arrives (`RemoteProtocolError`). A refused frame
changes nothing.

Two parties: the *driver* sends WORK (a coordinator, or the hop before), the *server* answers it (a
worker). On a control connection the server dialled and introduces itself; on a data connection the
driver dialled and starts at once, or asks for extensions first. After the extension hellos notices
may stand between any two frames; they change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Final

from ds4py.errors import LocalProtocolError, RemoteProtocolError
from ds4py.wire.frames import EXT_HELLO, ExtType, FrameType, type_name


class Side(IntEnum):
    """Which party sends a frame; numbers, because each frame is looked up by one."""

    DRIVER = 0
    SERVER = 1


class State(Enum):
    """Where a connection stands."""

    REGISTRATION = "waiting for the worker to introduce itself"
    REGISTERED = "waiting for the coordinator's extension hello"
    OPENED = "opened"
    ASKED = "waiting for the worker's extension hello"
    SERVING = "serving"
    SAVING = "waiting for a snapshot to begin"
    SHARD = "receiving a snapshot"
    LOADING = "sending a snapshot"
    CLOSED = "closed by an error"


class Role(Enum):
    """Which end of which kind of connection we are: our side, and the state it starts in."""

    COORDINATOR_CONTROL = (Side.DRIVER, State.REGISTRATION)
    WORKER_CONTROL = (Side.SERVER, State.REGISTRATION)
    DATA_DRIVER = (Side.DRIVER, State.OPENED)
    DATA_SERVER = (Side.SERVER, State.OPENED)


_REFUSED_BEGIN: Final = -1  # a SNAPSHOT_BEGIN with an error status: nothing follows it

Moves = Mapping[tuple[Side, int], State]

_ERRORS: Final[Moves] = {
    (Side.DRIVER, FrameType.ERROR): State.CLOSED,
    (Side.SERVER, FrameType.ERROR): State.CLOSED,
}
_SERVING: Final[Moves] = {
    (Side.DRIVER, FrameType.WORK): State.SERVING,
    (Side.SERVER, FrameType.RESULT): State.SERVING,
    (Side.DRIVER, FrameType.SNAPSHOT_SAVE_REQ): State.SAVING,
    (Side.DRIVER, FrameType.SNAPSHOT_LOAD_BEGIN): State.LOADING,
    **_ERRORS,
}
TABLE: Final[Mapping[State, Moves]] = {
    State.REGISTRATION: {
        (Side.SERVER, FrameType.HELLO): State.SERVING,
        (Side.SERVER, EXT_HELLO): State.REGISTERED,
        **_ERRORS,
    },
    State.REGISTERED: {(Side.DRIVER, EXT_HELLO): State.SERVING, **_ERRORS},
    State.OPENED: {(Side.DRIVER, EXT_HELLO): State.ASKED, **_SERVING},
    State.ASKED: {(Side.SERVER, EXT_HELLO): State.SERVING, **_ERRORS},
    State.SERVING: _SERVING,
    # Results of earlier WORK may still arrive, but never between the frames of a shard: the worker
    # holds its write lock for the whole of it.
    State.SAVING: {
        (Side.SERVER, FrameType.RESULT): State.SAVING,
        (Side.SERVER, FrameType.SNAPSHOT_BEGIN): State.SHARD,
        (Side.SERVER, _REFUSED_BEGIN): State.SERVING,
        **_ERRORS,
    },
    State.SHARD: {
        (Side.SERVER, FrameType.SNAPSHOT_CHUNK): State.SHARD,
        (Side.SERVER, FrameType.SNAPSHOT_DONE): State.SERVING,
        **_ERRORS,
    },
    State.LOADING: {
        (Side.DRIVER, FrameType.SNAPSHOT_CHUNK): State.LOADING,
        (Side.SERVER, FrameType.RESULT): State.LOADING,
        (Side.SERVER, FrameType.SNAPSHOT_DONE): State.SERVING,
        **_ERRORS,
    },
    State.CLOSED: {},
}
NOTICES: Final = frozenset(
    {
        (Side.DRIVER, ExtType.ALIVE),
        (Side.SERVER, ExtType.ALIVE),
        (Side.DRIVER, ExtType.CANCEL),
        (Side.DRIVER, ExtType.DROP),
        (Side.DRIVER, ExtType.HOP_LOST),
        (Side.DRIVER, ExtType.FORK),
    }
)
"""What may be said at any time between peers that have exchanged extension hellos."""


class ProtocolState:
    """One end of one connection.

    Args:
        role: Which end we are.
    """

    __slots__ = ("_awaited", "_extended", "_moves", "_peer", "_us", "state")

    def __init__(self, role: Role):
        self._us, self.state = role.value
        self._moves = TABLE[self.state]
        self._peer = Side.SERVER if self._us is Side.DRIVER else Side.DRIVER
        self._awaited = 0  # WORK without a RESULT yet
        self._extended = False  # the extension hellos were exchanged

    def sent(self, frame_type: int, *, refused: bool = False) -> None:
        """Take note of a frame that we are about to send.

        Args:
            frame_type: Its type.
            refused: It is a SNAPSHOT_BEGIN with an error status.

        Raises:
            LocalProtocolError: It is not our turn to send that; kinds as in `received`.
        """
        problem = self._advance(self._us, frame_type, refused=refused)
        if problem is not None:
            kind, what = problem
            raise LocalProtocolError(f"about to send {what}", kind=kind)

    def received(self, frame_type: int, *, refused: bool = False) -> None:
        """Take note of a frame that the peer sent.

        Args:
            frame_type: Its type; unknown types are refused.
            refused: It is a SNAPSHOT_BEGIN with an error status.

        Raises:
            RemoteProtocolError: Kind "H-TYPE" for a first frame that introduces nobody,
                "R-REQUEST" for an answer that nobody asked for, "F-TYPE" for all else.
        """
        problem = self._advance(self._peer, frame_type, refused=refused)
        if problem is not None:
            kind, what = problem
            raise RemoteProtocolError(f"the peer sent {what}", kind=kind)

    def _advance(self, sender: Side, frame_type: int, *, refused: bool) -> tuple[str, str] | None:
        """Move on, or return kind and text of what is wrong."""
        open_to_notices = self._extended and self.state is not State.CLOSED
        if open_to_notices and (sender, frame_type) in NOTICES:
            return None
        refused_begin = refused and frame_type == FrameType.SNAPSHOT_BEGIN
        event = _REFUSED_BEGIN if refused_begin else frame_type
        following = self._moves.get((sender, event))
        if following is None:
            kind = "H-TYPE" if self.state is State.REGISTRATION else "F-TYPE"
            return kind, f"{type_name(frame_type)} while the connection is {self.state.value}"
        if frame_type == FrameType.RESULT:
            if self._awaited == 0:
                return "R-REQUEST", "RESULT, but no WORK waits for one"
            self._awaited -= 1
        elif frame_type == FrameType.WORK:
            self._awaited += 1
        elif frame_type == EXT_HELLO:
            self._extended = following is State.SERVING
        if following is not self.state:
            self.state, self._moves = following, TABLE[following]
        return None
