"""Typed getters: the asked type or one clear error."""

import numpy as np
import pytest

from ds4py.errors import ModelError
from ds4py.gguf.metadata import Metadata

VALUES = {
    "int": 7,
    "float": 2.5,
    "bool": True,
    "str": "text",
    "strings": ["a", "b"],
    "ints": np.array([1, 2], np.uint8),
    "floats": np.array([0.5], np.float64),
}
META = Metadata(VALUES)


def test_it_is_a_mapping_of_the_plain_values():
    assert dict(META) == VALUES
    assert len(META) == len(VALUES)


def test_getters_return_values_of_their_type():
    assert META.get_int("int", None) == META.require_int("int") == 7
    assert META.get_float("float", None) == META.require_float("float") == 2.5
    assert META.get_bool("bool", None) is True
    assert META.get_str("str", None) == META.require_str("str") == "text"
    assert META.get_strings("strings", None) == META.require_strings("strings") == ["a", "b"]


def test_number_arrays_come_in_one_width():
    ints, floats = META.get_ints("ints", None), META.get_floats("floats", None)
    assert ints is not None
    assert floats is not None
    assert (ints.dtype, ints.tolist()) == (np.int64, [1, 2])
    assert (floats.dtype, floats.tolist()) == (np.float32, [0.5])


def test_an_integer_is_good_for_a_float():
    value = META.get_float("int", None)
    assert (type(value), value) == (float, 7.0)


def test_an_absent_key_gives_the_default():
    getters = [
        META.get_int, META.get_float, META.get_bool, META.get_str,
        META.get_strings, META.get_ints, META.get_floats,
    ]  # fmt: skip
    marker = object()
    assert all(getter("absent", marker) is marker for getter in getters)


@pytest.mark.parametrize(
    ("getter", "keys"),
    [
        ("get_int", ["float", "bool", "str", "strings", "ints"]),
        ("get_float", ["bool", "str", "strings", "floats"]),
        ("get_bool", ["int", "str", "floats"]),
        ("get_str", ["int", "bool", "strings"]),
        ("get_strings", ["str", "ints"]),
        ("get_ints", ["int", "strings", "floats"]),
        ("get_floats", ["float", "strings", "ints"]),
    ],
)
def test_a_value_of_another_type_is_refused_by_every_getter(getter: str, keys: list[str]):
    for key in keys:
        with pytest.raises(ModelError, match=f"metadata key {key}: got .*, expected a"):
            getattr(META, getter)(key, None)


@pytest.mark.parametrize(
    "getter", ["require_int", "require_float", "require_str", "require_strings"]
)
def test_a_required_key_that_is_absent_is_named_with_the_note(getter: str):
    meta = Metadata({}, " (the first shard is missing)")
    with pytest.raises(ModelError, match=r"metadata key k: got nothing \(the first shard is"):
        getattr(meta, getter)("k")


def test_a_long_value_is_cut_in_the_message():
    meta = Metadata({"k": "x" * 10_000})
    with pytest.raises(ModelError) as caught:
        meta.require_int("k")
    assert len(str(caught.value)) < 150
