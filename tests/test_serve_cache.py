"""Slot tables and the KV pool on a CPU, against plain loops and SGLang's own moves."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import move_kv_cache_native

from domino_kit.serve.cpu_cache import CpuKVPool, gather_slots, write_slots

pytestmark = pytest.mark.sglang

KINDS = [torch.int32, torch.int64]


def random_table(rows: int, width: int) -> Tensor:
    """A table of slots that are all different, int32 as in SGLang."""
    draw = torch.Generator().manual_seed(rows * width)
    return torch.randperm(rows * width, generator=draw).view(rows, width).int()


@pytest.mark.parametrize("offsets", KINDS)
@pytest.mark.parametrize("table", KINDS)
@pytest.mark.parametrize(
    ("starts", "counts"),
    [
        ([4], [3]),
        ([0, 7, 2], [5, 1, 9]),
        ([3, 0, 11, 6], [2, 0, 1, 6]),  # one request has no new slots
        ([5, 5], [0, 0]),
        ([0, 8], [0, 4]),
        ([9, 1], [3, 0]),
    ],
)
def test_write_slots_equals_a_loop(
    starts: list[int], counts: list[int], table: torch.dtype, offsets: torch.dtype
) -> None:
    requests = torch.tensor([5, 2, 0, 4][: len(starts)])
    written = random_table(6, 12).to(table)
    expected = written.clone()
    new = 1000 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))
    given = iter(new.tolist())
    for request, start, count in zip(requests.tolist(), starts, counts, strict=True):
        for position in range(start, start + count):
            expected[request, position] = next(given)
    start = torch.tensor(starts, dtype=offsets)
    end = start + torch.tensor(counts, dtype=offsets)
    write_slots(requests, written, start, end, new, len(starts))
    assert written.dtype == table
    assert torch.equal(written, expected)


def test_write_slots_leaves_what_is_too_much() -> None:
    """SGLang may hand over more slots than the ranges take."""
    table = torch.zeros(2, 4, dtype=torch.int32)
    write_slots(
        torch.tensor([1]), table, torch.tensor([1]), torch.tensor([3]), torch.arange(7, 12), 1
    )
    assert table.tolist() == [[0, 0, 0, 0], [0, 7, 8, 0]]


@pytest.mark.parametrize("offsets", KINDS)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("starts", [[0], [8], [3, 0, 7]])
def test_gather_slots_equals_a_loop(starts: list[int], count: int, offsets: torch.dtype) -> None:
    requests = torch.tensor([5, 2, 0][: len(starts)])
    table = random_table(6, 12)
    start = torch.tensor(starts, dtype=offsets)
    expected = [
        int(table[request, position])
        for request, begin in zip(requests.tolist(), starts, strict=True)
        for position in range(begin, begin + count)
    ]
    found = gather_slots(requests, table, start, start + count, len(starts), count, "cpu")
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_gather_slots_reads_what_write_slots_wrote() -> None:
    requests, start = torch.tensor([3, 1]), torch.tensor([2, 5])
    table, new = random_table(4, 9), torch.arange(100, 106)
    write_slots(requests, table, start, start + 3, new, 2)
    assert torch.equal(gather_slots(requests, table, start, start + 3, 2, 3, "cpu"), new)


def random_pool(page_size: int, dtype: torch.dtype = torch.float32) -> CpuKVPool:
    """A pool as speculation asks for it, with other numbers at every place."""
    pool = CpuKVPool(
        size=64, page_size=page_size, dtype=dtype, head_num=2, head_dim=4, layer_num=2,
        device="cpu", enable_memory_saver=False, enable_kv_cache_copy=True,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(page_size)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=draw))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("targets", "sources"),
    [
        ([5, 6, 7], [20, 9, 33]),
        ([20, 21, 22], [21, 22, 23]),  # compaction: what is moved from is also moved to
        ([23, 22, 21], [22, 21, 20]),
        ([], []),
    ],
)
def test_pool_moves_keys_and_values_of_all_layers(
    targets: list[int], sources: list[int], page_size: int, dtype: torch.dtype
) -> None:
    pool = random_pool(page_size, dtype)
    keys, values = [k.clone() for k in pool.k_buffer], [v.clone() for v in pool.v_buffer]
    by_hand = [buffer.clone() for buffer in (*keys, *values)]
    target, source = torch.tensor(targets).long(), torch.tensor(sources).long()
    for buffer, before in zip(by_hand, [*keys, *values], strict=True):
        for to, at in zip(targets, sources, strict=True):
            buffer[to] = before[at]
    move_kv_cache_native(keys, values, target, source)
    pool.move_kv_cache(target, source)
    found = [*pool.k_buffer, *pool.v_buffer]
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, [*keys, *values], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, by_hand, strict=True))
