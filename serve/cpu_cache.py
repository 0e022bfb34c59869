"""The KV cache on a CPU: SGLang's pool and slot tables with indexing in place of Triton kernels."""

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor


class CpuKVPool(MHATokenToKVPool):
    """SGLang's KV pool, without the Triton copy kernel that speculation warms up on a GPU."""

    def _init_kv_copy_and_warmup(self) -> None:
        # The same moves by indexing; the base class knows that route under this name.
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True


def gather_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """Slots of positions ``start_offset`` … + ``draft_token_num`` of each request, flat int64.

    The names of the arguments are SGLang's (``assign_extend_cache_locs_func``).
    """
    columns = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], columns].flatten().long()


def write_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write new slots into each request's row at ``start_offset`` … ``end_offset``, in order."""
    counts = (end_offset - start_offset).long()
    rows = req_pool_indices.repeat_interleave(counts)
    begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
    columns = torch.arange(len(rows)) - begins + start_offset.long().repeat_interleave(counts)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)
