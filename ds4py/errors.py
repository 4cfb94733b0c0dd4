"""Every exception that ds4py raises on purpose, in one tree.

Owns: the vocabulary of failure. Refuses to know: sockets, tensors, HTTP. Invariant: whatever a
caller may want to handle descends from `Ds4Error`; the text reads subject, got, expected, and what
a program needs to decide stands in attributes, so that nobody matches on text.

    Ds4Error
      ConfigError                     flags, values, environment           exit status 2
      FormatError                     bytes at rest: path, offset, what
        GgufError
        SnapshotError
        UnsupportedQuantError
      ModelError                      weights do not fit the shape: tensor, got, expected
      KernelError                     memory that compiled code cannot take: a bug of ours
      ProtocolError                   (never raised itself)
        LocalProtocolError            we were about to break the protocol: a bug of ours
        RemoteProtocolError           the peer broke it: close the connection
      TransportError                  (peer)
        ConnectError
        PeerClosedError
        TransportTimeoutError
      ClusterError
        RouteIncompleteError          layers nobody owns: retry when a worker arrives
        PrefixMismatchError           this stage holds another timeline: replay the transcript
        RemoteWorkError               a stage refused or failed; its own words, and the hop
      CapacityError                   context or memory exhausted: needed, available
      CancelledError                  the caller asked for the work to stop
      RequestError                    bad client request: status, code, param
"""

from __future__ import annotations

from pathlib import Path


class Ds4Error(Exception):
    """Root of all errors that ds4py raises on purpose."""


class ConfigError(Ds4Error):
    """A flag, a value or an environment variable is not usable."""


class FormatError(Ds4Error):
    """Bytes at rest are not what they claim to be.

    Args:
        what: What was found and what was expected, as one sentence.
        path: The file, when there is one.
        offset: Byte offset of the offending field inside the file.
    """

    def __init__(self, what: str, *, path: Path | str | None = None, offset: int | None = None):
        where = f"{path}: " if path is not None else ""
        at = f" (at byte {offset})" if offset is not None else ""
        super().__init__(f"{where}{what}{at}")
        self.what = what
        self.path = path
        self.offset = offset


class GgufError(FormatError):
    """A GGUF file is damaged, incomplete, or not a GGUF file."""


class SnapshotError(FormatError):
    """A saved session is damaged or belongs to another model."""


class UnsupportedQuantError(FormatError):
    """A tensor type that ds4py cannot decode is needed by the chosen layers."""


class ModelError(Ds4Error):
    """Weights or hidden states do not fit the model's shape.

    Args:
        tensor: Name of the offending tensor or metadata key.
        got: What the file or peer has.
        expected: What the architecture needs.
    """

    def __init__(self, tensor: str, *, got: object, expected: object):
        super().__init__(f"{tensor}: got {got}, expected {expected}")
        self.tensor = tensor
        self.got = got
        self.expected = expected


class KernelError(Ds4Error):
    """Compiled code was about to get memory that it would read or write wrongly.

    Args:
        what: The tensor, by its name in the kernel's own words.
        got: Its type, shape, strides or device.
        expected: What the kernel assumes.
    """

    def __init__(self, what: str, *, got: object, expected: object):
        super().__init__(f"{what}: got {got}, expected {expected}")
        self.what = what
        self.got = got
        self.expected = expected


class ProtocolError(Ds4Error):
    """The DS4D protocol was broken; see the two leaves.

    Args:
        what: What was found and what was expected.
        kind: Class name of the rule in docs/spec/wire-protocol.md, such as "W-SIZES".
    """

    def __init__(self, what: str, *, kind: str = ""):
        super().__init__(what)
        self.what = what
        self.kind = kind


class LocalProtocolError(ProtocolError):
    """We were about to send something illegal."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something illegal."""


class TransportError(Ds4Error):
    """A connection could not be made or did not survive.

    Args:
        what: What happened.
        peer: Printable address of the other side.
    """

    def __init__(self, what: str, *, peer: str = ""):
        super().__init__(f"{peer}: {what}" if peer else what)
        self.what = what
        self.peer = peer


class ConnectError(TransportError):
    """No connection could be made."""


class PeerClosedError(TransportError):
    """The peer closed or reset the connection."""


class TransportTimeoutError(TransportError):
    """The peer made no progress within the deadline."""


class ClusterError(Ds4Error):
    """Several machines could not act as one."""


class RouteIncompleteError(ClusterError):
    """No worker owns some of the layers.

    Args:
        missing: Human list of what nobody owns, such as "layers 13-24 and the output head".
        first_missing: First layer that could not be covered.
    """

    def __init__(self, missing: str, *, first_missing: int):
        super().__init__(
            f"the route is not complete: no worker serves {missing}; "
            "start one for them, or wait for it to come back"
        )
        self.missing = missing
        self.first_missing = first_missing


class PrefixMismatchError(ClusterError):
    """A stage holds another token timeline than the span continues."""


class RemoteWorkError(ClusterError):
    """A stage answered a span with an error.

    Args:
        message: The stage's own words.
        hop: Printable name of the hop that reported it.
    """

    def __init__(self, message: str, *, hop: str):
        super().__init__(f"{hop} refused the work: {message}")
        self.message = message
        self.hop = hop


class CapacityError(Ds4Error):
    """Context or memory is exhausted; nothing was changed.

    Args:
        what: What ran out.
        needed: How much was asked for.
        available: How much there is.
    """

    def __init__(self, what: str, *, needed: int, available: int):
        super().__init__(f"{what}: needed {needed}, available {available}")
        self.needed = needed
        self.available = available


class CancelledError(Ds4Error):
    """The caller asked for the work to stop; what was finished stays valid.

    Args:
        what: One line.
        uneven: Some stages may hold chunks that others left out.
    """

    def __init__(self, what: str, *, uneven: bool = False):
        super().__init__(what)
        self.uneven = uneven


class RequestError(Ds4Error):
    """A client's request cannot be served.

    Args:
        message: What the client should read.
        status: HTTP status.
        code: Machine-readable code, such as "context_length_exceeded".
        param: Name of the offending request field.
        extra: Further JSON members of the error object.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        extra: dict[str, int] | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.extra = extra or {}
