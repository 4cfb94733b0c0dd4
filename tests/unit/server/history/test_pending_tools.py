"""Conversations that results of tools go on with."""

from ds4py.server.history.pending_tools import PendingTools
from ds4py.server.requests.request import ChatMessage, Conversation, Toolbox


def kept(text="hi"):
    return Conversation((ChatMessage("user", text),), Toolbox(("{}",)))


def test_exactly_the_calls_of_a_reply_find_it_in_any_order():
    found = PendingTools()
    found.keep(["a", "b"], kept())
    assert found.find(["b", "a"]) == kept()
    assert found.find(["a"]) is None
    assert found.find(["a", "b", "c"]) is None


def test_a_later_reply_with_the_same_ids_replaces_an_earlier_one():
    found = PendingTools()
    found.keep(["a"], kept("one"))
    found.keep(["a"], kept("two"))
    assert found.find(["a"]) == kept("two")


def test_memory_is_bounded_and_the_longest_unused_goes_first():
    one = kept("x" * 1000)
    found = PendingTools(max_bytes=3 * one.n_bytes)
    for name in "abc":
        found.keep([name], one)
    found.find(["a"])
    found.keep(["d"], one)
    assert [name for name in "abcd" if found.find([name])] == ["a", "c", "d"]


def test_one_that_is_larger_than_all_memory_is_not_kept():
    found = PendingTools(max_bytes=100)
    found.keep(["a"], kept())
    assert found.find(["a"]) is None
