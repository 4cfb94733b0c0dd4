import pytest
import torch

from ds4py.engine.kv_pool import KvPool
from ds4py.errors import CapacityError
from ds4py.kernels.cache import CacheTensor

CPU = torch.device("cpu")
LAYOUT = [CacheTensor((2, 8, 4), torch.float32, 1), CacheTensor((6,), torch.bfloat16)]


def test_each_slot_has_tensors_of_its_own_as_laid_out():
    pool = KvPool(LAYOUT, 2, CPU, n_ctx=8)
    a, b = pool.cache(pool.acquire()), pool.cache(pool.acquire())
    for cache in (a, b):
        assert [(t.shape, t.dtype) for t in cache] == [(p.shape, p.dtype) for p in LAYOUT]
    a[0].fill_(1)
    b[0].fill_(2)
    assert (a[0] == 1).all()
    assert pool.slot_bytes == 4 * 64 + 2 * 6


def test_no_slot_left_is_a_capacity_error_with_both_numbers():
    pool = KvPool(LAYOUT, 1, CPU, n_ctx=8)
    slot = pool.acquire()
    with pytest.raises(CapacityError) as caught:
        pool.acquire()
    assert (caught.value.needed, caught.value.available) == (2, 1)
    pool.release(slot)
    assert pool.acquire() == slot


def test_more_memory_than_there_can_be_is_a_capacity_error():
    layout = [CacheTensor((1 << 60,), torch.float32, 0)]
    with pytest.raises(CapacityError, match="shorter context or fewer sessions") as caught:
        KvPool(layout, 1, CPU, n_ctx=1 << 60)
    assert caught.value.needed == 1 << 62


def test_reserved_memory_is_not_touched():
    """64 GiB of caches are taken at once: only what is written costs memory."""
    layout = [CacheTensor((1 << 28,), torch.float32, 0)] * 16
    pool = KvPool(layout, 4, CPU, n_ctx=1 << 28)
    assert pool.slot_bytes == 16 << 30
