import pytest

from ds4py.errors import ModelError
from ds4py.models import llama
from ds4py.models.registry import KNOWN, load_architecture


def test_a_known_architecture_is_its_module():
    found = load_architecture("llama")
    assert found is llama.ARCHITECTURE


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ModelError) as caught:
        load_architecture("mamba")
    assert "got 'mamba'" in str(caught.value)
    assert all(name in str(caught.value) for name in KNOWN)
