"""The memory of calls: what comes back, what is forgotten, what survives a restart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from ds4py.server.history.tool_calls import ToolCallMemory


def test_a_block_comes_back_if_all_calls_are_of_it() -> None:
    memory = ToolCallMemory()
    memory.remember(["a", "b"], "\n\nAB")
    memory.remember(["c"], "C")
    assert memory.block_for(["a", "b"]) == memory.block_for(["b"]) == "\n\nAB"
    assert memory.block_for(["b", "a"]) == "\n\nAB"
    for ids in ([], ["x"], ["a", "x"], ["a", "c"]):
        assert memory.block_for(ids) is None
    assert memory.unknown(["a", "x", "c"]) == ["x"]


def test_what_was_remembered_last_counts() -> None:
    memory = ToolCallMemory(max_bytes=4)
    memory.remember(["a"], "old")
    memory.remember(["a"], "new!")
    assert memory.block_for(["a"]) == "new!"
    assert memory.items_for(["old", "new!"]) == {b"a": b"new!"}


def test_the_least_recently_used_id_is_forgotten_first() -> None:
    memory = ToolCallMemory(max_ids=2)
    memory.remember(["a"], "A")
    memory.remember(["b"], "B")
    assert memory.block_for(["a"]) == "A"
    memory.remember(["c"], "C")
    assert [memory.block_for([id_]) for id_ in "abc"] == ["A", None, "C"]


def test_bytes_of_blocks_are_limited_and_shared_ones_count_once() -> None:
    memory = ToolCallMemory(max_bytes=8)
    memory.remember(["a", "b"], "é" * 3)
    memory.remember(["c"], "é")
    assert memory.block_for(["a", "b"]) == "é" * 3
    memory.remember(["d"], "x")
    assert [memory.block_for([id_]) for id_ in "abcd"] == ["é" * 3, "é" * 3, None, "x"]


def test_a_block_without_room_is_not_remembered_and_pushes_out_nothing() -> None:
    memory = ToolCallMemory(max_bytes=4)
    memory.remember(["a"], "A")
    memory.remember(["b"], "BBBBB")
    memory.remember(["c"], "")
    assert [memory.block_for([id_]) for id_ in "abc"] == ["A", None, None]
    nothing = ToolCallMemory(max_ids=0)
    nothing.remember(["a"], "A")
    assert nothing.block_for(["a"]) is None


def test_the_calls_of_a_prompt_survive_a_restart() -> None:
    memory = ToolCallMemory()
    memory.remember(["b", "a"], "AB 😀")
    memory.remember(["c"], "C")
    stored = memory.items_for(["AB 😀", "unknown", "AB 😀"])
    assert stored == {b"a": "AB 😀".encode(), b"b": "AB 😀".encode()}
    again = ToolCallMemory()
    again.remember(["b"], "newer")
    again.restore({**stored, b"\xff": b"x", b"d": b"\xff"})
    assert [again.block_for([id_]) for id_ in "abcd"] == ["AB 😀", "newer", None, None]


IDS = st.sampled_from("abcdef")
STEPS = st.lists(
    st.tuples(st.just("remember"), st.lists(IDS, max_size=3), st.text("xyé", max_size=4))
    | st.tuples(st.just("restore"), st.lists(IDS, max_size=3), st.text("xyé", max_size=4))
    | st.tuples(st.just("use"), st.lists(IDS, max_size=3), st.just("")),
    max_size=12,
)


@given(STEPS, st.integers(0, 4), st.integers(0, 9))
def test_the_limits_hold_and_nothing_is_made_up(
    steps: list[tuple[str, list[str], str]], max_ids: int, max_bytes: int
) -> None:
    memory, told = ToolCallMemory(max_ids, max_bytes), {}
    for what, ids, block in steps:
        if what == "remember":
            memory.remember(ids, block)
            told |= {id_: {block} for id_ in ids}
        elif what == "restore":
            memory.restore({id_.encode(): block.encode() for id_ in ids})
            for id_ in ids:
                told[id_] = told.get(id_, set()) | {block}
        else:
            memory.block_for(ids)
        found = {id_: memory.block_for([id_]) for id_ in "abcdef"}
        known = {id_: block for id_, block in found.items() if block is not None}
        assert len(known) <= max_ids
        assert sum(len(block.encode()) for block in set(known.values())) <= max_bytes
        assert all(block in told[id_] for id_, block in known.items())
        assert memory.unknown("abcdef") == [id_ for id_ in "abcdef" if id_ not in known]
        stored = memory.items_for(set(known.values()))
        assert stored == {id_.encode(): block.encode() for id_, block in known.items()}


def test_threads_may_share_it() -> None:
    memory = ToolCallMemory(max_ids=40)

    def work(name: str) -> None:
        for n in range(200):
            ids = [f"{name}{n}", f"{name}{n}+"]
            memory.remember(ids, f"block {name}{n}")
            assert memory.block_for(ids) in {f"block {name}{n}", None}
            assert len(memory.items_for([f"block {name}{n}"])) <= 2

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, name) for name in "abcd"]:
            done.result(30)
    assert memory.block_for(["a199", "b199"]) is None
