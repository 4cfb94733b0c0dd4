"""The kernel for 4 x 4 matrices gives what the torch operations give."""

import pytest
import torch

from ds4py.kernels.cpu import sinkhorn
from ds4py.models.deepseek4.hyper import Sinkhorn


def reference(scores: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    plain = Sinkhorn(4, iterations, eps, torch.device("cpu"))
    plain._for_cpu = False
    return plain(scores)


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_the_kernel_equals_the_operations(iterations, n_tokens, spread):
    generator = torch.Generator().manual_seed(n_tokens)
    scores = spread * torch.randn((n_tokens, 16), generator=generator)
    got = sinkhorn.balanced(scores, iterations, 1e-6)
    assert got.shape == (n_tokens, 4, 4)
    torch.testing.assert_close(got, reference(scores, iterations, 1e-6), rtol=2e-5, atol=1e-7)


def test_scores_beside_other_weights_are_balanced_alike():
    mixes = torch.randn((7, 24), generator=torch.Generator().manual_seed(0))
    whole = Sinkhorn(4, 20, 1e-6, torch.device("cpu"))(mixes[:, 8:])
    assert torch.equal(whole, sinkhorn.balanced(mixes[:, 8:].contiguous(), 20, 1e-6))


def test_a_balanced_matrix_is_nearly_doubly_stochastic():
    got = sinkhorn.balanced(torch.randn((3, 16)), 50, 1e-6)
    torch.testing.assert_close(got.sum(1), torch.ones(3, 4), atol=1e-3, rtol=0)
    torch.testing.assert_close(got.sum(2), torch.ones(3, 4), atol=1e-3, rtol=0)


def test_the_model_uses_the_kernel_for_four_streams_only():
    device = torch.device("cpu")
    assert Sinkhorn(4, 20, 1e-6, device)._for_cpu
    assert not Sinkhorn(2, 20, 1e-6, device)._for_cpu
