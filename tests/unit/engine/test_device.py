import pytest
import torch

from ds4py.engine.device import choose_device, choose_dtype, set_threads
from ds4py.errors import ConfigError

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_cpu_is_the_cpu():
    assert choose_device("cpu") == torch.device("cpu")


@needs_no_cuda
def test_auto_falls_back_to_the_cpu():
    assert choose_device("auto") == torch.device("cpu")


@needs_no_cuda
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_device_that_is_not_there_is_a_clear_error(name):
    with pytest.raises(ConfigError, match="no CUDA device that torch can use; choose another"):
        choose_device(name)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "mps", ""])
def test_another_word_is_a_clear_error(name):
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda or cuda:N"):
        choose_device(name)


def test_precision_chooses_the_type():
    assert choose_dtype("f32") is torch.float32
    assert choose_dtype("bf16") is torch.bfloat16
    assert choose_dtype("auto") is torch.bfloat16


def test_a_number_of_threads_is_set_and_none_is_between_one_and_twelve():
    assert set_threads(2) == torch.get_num_threads() == 2
    assert 1 <= set_threads(None) == torch.get_num_threads() <= 12
