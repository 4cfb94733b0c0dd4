"""Layer ranges: the three spellings, what they mean, balanced cuts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4py.errors import ConfigError
from ds4py.layer_range import LayerRange, LayerSpec, balanced_cuts, describe_missing, whole_model
from tests.support.strategies import spans


@pytest.mark.parametrize(
    ("text", "n_layers", "expected"),
    [
        ("0-12", 25, LayerRange(0, 12)),
        ("13-24", 25, LayerRange(13, 24, has_output=True)),
        ("13:24", 25, LayerRange(13, 24)),
        ("13:output", 25, LayerRange(13, 24, has_output=True)),
        ("24-24", 25, LayerRange(24, 24, has_output=True)),
        (" 0:0 ", 1, LayerRange(0, 0)),
    ],
)
def test_each_spelling_means_what_its_author_means(text, n_layers, expected):
    assert LayerSpec.parse(text).resolve(n_layers) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", ":4", "4:", "-4", "a:b", "0:20,output", "output", "output:3", "1:2:3"),
        *("0x1:2", "+1:2", "-1:2", "1 : 2", "1.0:2", "٣:٤", "1" * 10 + ":2", "0:OUTPUT"),
    ],
)
def test_other_texts_are_refused_with_the_usage(text):
    with pytest.raises(ConfigError, match="expected A-B, A:B or A:output"):
        LayerSpec.parse(text)


@pytest.mark.parametrize("text", ["5:3", "5-3"])
def test_a_reversed_range_is_named_as_such(text):
    with pytest.raises(ConfigError, match="the range is reversed"):
        LayerSpec.parse(text)


def test_a_dash_before_output_gets_the_right_spelling_as_advice():
    with pytest.raises(ConfigError, match="write 3:output"):
        LayerSpec.parse("3-output")


@pytest.mark.parametrize("text", ["0-99", "0-25", "25:output", "25:25"])
def test_a_range_past_the_last_layer_names_the_last_layer(text):
    with pytest.raises(ConfigError, match="the model has layers 0-24"):
        LayerSpec.parse(text).resolve(25)


@pytest.mark.parametrize("text", ["3-7", "3:7", "3:output", "0-0"])
def test_a_spec_prints_as_it_was_written(text):
    assert str(LayerSpec.parse(text)) == text


@pytest.mark.parametrize(("start", "end"), [(3, 2), (-1, 2)])
def test_an_empty_span_does_not_exist(start, end):
    with pytest.raises(ConfigError, match="the range is empty"):
        LayerRange(start, end)


@given(spans())
def test_a_span_is_the_set_of_its_layers(span):
    assert len(span) == len(span.indices)
    assert [n for n in range(-2, 202) if n in span] == list(span.indices)
    assert "3" not in span


def test_a_span_prints_its_head():
    assert str(LayerRange(13, 24, has_output=True)) == "13-24 and the output head"
    assert str(LayerRange(0, 12)) == "0-12"
    assert whole_model(3) == LayerRange(0, 2, has_output=True)


@pytest.mark.parametrize(
    ("first", "until", "text"),
    [
        (13, None, "layers 13-24 and the output head"),
        (24, None, "layer 24 and the output head"),
        (25, None, "the output head"),
        (3, 7, "layers 3-6"),
        (3, 4, "layer 3"),
    ],
)
def test_what_is_missing_is_named_for_people(first, until, text):
    assert describe_missing(first, 25, until) == text


def largest_part(weights, ends):
    bounds = itertools.pairwise([0, *ends, len(weights)])
    return max(sum(weights[a:b]) for a, b in bounds)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.data())
def test_balanced_cuts_are_contiguous_and_as_even_as_brute_force(weights, data):
    n_parts = data.draw(st.integers(1, len(weights)))
    head = data.draw(st.integers(0, 50))
    cuts = balanced_cuts(weights, n_parts, head)
    assert [layer for layers in cuts for layer in layers.indices] == list(range(len(weights)))
    assert [layers.has_output for layers in cuts] == [False] * (n_parts - 1) + [True]
    loaded = [*weights[:-1], weights[-1] + head]
    choices = itertools.combinations(range(1, len(weights)), n_parts - 1)
    best = min(largest_part(loaded, ends) for ends in choices)
    assert largest_part(loaded, [layers.start for layers in cuts[1:]]) == best


@pytest.mark.parametrize("n_parts", [0, 4])
def test_more_machines_than_layers_or_none_are_refused(n_parts):
    with pytest.raises(ConfigError, match="choose 1 to 3"):
        balanced_cuts([1, 1, 1], n_parts)
