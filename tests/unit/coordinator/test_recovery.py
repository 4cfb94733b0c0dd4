"""What is tried again, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.coordinator.recovery import Failure, Recovery, as_capacity, classify
from ds4py.errors import (
    CacheFullError,
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
        (CacheFullError("slots", needed=2, available=1), True, Failure.FULL),
        (CapacityError("KV cache: slots", needed=2, available=1), True, Failure.FINAL),
        (RemoteWorkError("KV cache: slots", hop="w"), True, Failure.FULL),
        (RemoteWorkError("KV cache: slots", hop="w"), False, Failure.FULL),
        (RemoteWorkError("kein Platz", hop="w", cache_full=True), True, Failure.FULL),
        (RemoteWorkError("kein Platz", hop="w", cache_full=True), False, Failure.FULL),
        (RemoteWorkError("about the KV cache: slots", hop="w"), True, Failure.REFUSED),
        (PeerClosedError("KV cache: slots"), True, Failure.LOST),
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
    assert allowed.count(Failure.FULL) == min(2, failures.count(Failure.FULL))
    assert Failure.FINAL not in allowed


@given(st.integers(0, 2**63), st.integers(0, 2**63))
def test_a_hops_lack_of_room_keeps_its_numbers(needed, available) -> None:
    what = "KV cache: no room: none, at all; bytes"
    there = CapacityError(what, needed=needed, available=available)
    here = as_capacity(RemoteWorkError(str(there), hop="worker 7"))
    assert isinstance(here, CapacityError)
    assert (here.needed, here.available) == (needed, available)
    assert str(here) == str(there)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "KV cache: full",
        "KV cache: needed 1, available",
        "KV cache: x: needed 1, available 2 or so",
        "KV cache: x: needed -1, available 2",
        f"KV cache: x: needed {'9' * 4000}, available 2",
        "KV cache: x: needed \N{ARABIC-INDIC DIGIT ONE}, available 2",
    ],
)
def test_words_without_numbers_stay_what_they_are(words) -> None:
    error = RemoteWorkError(words, hop="w")
    assert as_capacity(error) is error


def test_our_own_lack_of_room_stays_what_it_is() -> None:
    error = CapacityError("KV cache: x", needed=2, available=1)
    assert as_capacity(error) is error
