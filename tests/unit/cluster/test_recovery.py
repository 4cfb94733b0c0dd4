"""What is tried again, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.cluster.recovery import Failure, Recovery, classify
from ds4py.errors import (
    CancelledError,
    CapacityError,
    ClusterError,
    ConfigError,
    ConnectError,
    PeerClosedError,
    PrefixMismatchError,
    RemoteWorkError,
    RouteIncompleteError,
    TransportTimeoutError,
)


@pytest.mark.parametrize(
    ("error", "current", "meaning"),
    [
        (RemoteWorkError("no", hop="w"), True, Failure.REFUSED),
        (RemoteWorkError("next hop died", hop="w"), False, Failure.LOST),
        (PrefixMismatchError("other"), True, Failure.REFUSED),
        (PrefixMismatchError("other"), False, Failure.LOST),
        (PeerClosedError("gone"), True, Failure.LOST),
        (PeerClosedError("gone"), False, Failure.LOST),
        (TransportTimeoutError("slow"), True, Failure.LOST),
        (ConnectError("none"), True, Failure.LOST),
        (ClusterError("the device failed"), True, Failure.FINAL),
        (CapacityError("context", needed=2, available=1), True, Failure.FINAL),
        (ConfigError("chunk"), True, Failure.FINAL),
        (RouteIncompleteError("layers 1-2", first_missing=1), False, Failure.FINAL),
        (CancelledError("stop"), False, Failure.FINAL),
    ],
)
def test_an_error_means(error, current, meaning) -> None:
    assert classify(error, route_is_current=current) is meaning


@given(st.lists(st.sampled_from(Failure), max_size=12))
def test_a_call_replays_at_most_once_for_each_reason(failures) -> None:
    recovery = Recovery()
    allowed = [failure for failure in failures if recovery.allows(failure)]
    assert allowed.count(Failure.REFUSED) == min(1, failures.count(Failure.REFUSED))
    assert allowed.count(Failure.LOST) == min(1, failures.count(Failure.LOST))
    assert Failure.FINAL not in allowed
