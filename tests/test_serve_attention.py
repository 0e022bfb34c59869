"""The CPU attention backend against plain formulas and against SGLang's own PyTorch backend."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("sglang")

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from domino_kit.serve.attention import CpuAttention, Span, attend, make_spans
from domino_kit.serve.cpu_cache import CpuKVPool

pytestmark = pytest.mark.sglang

BLOCKS = {
    "decode, equal lengths": ([1] * 4, [9] * 4),
    "decode, similar lengths": ([1] * 4, [9, 6, 12, 8]),
    "decode, very different lengths": ([1] * 4, [0, 50, 2, 3]),
    "decode, one request": ([1], [7]),
    "verify": ([4] * 3, [9, 7, 11]),
    "verify, very different lengths": ([8] * 3, [1, 70, 4]),
    "fresh prefill": ([13], [0]),
    "fresh prefills of one length": ([5] * 3, [0] * 3),
    "chunk after a prefix": ([6], [10]),
    "mixed extends": ([5, 1, 9, 2], [0, 8, 3, 11]),
}
"""Queries of each request and the tokens that stand before them."""


def make_batch(
    queries: list[int],
    prefixes: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 8,
    value_size: int = 8,
    spare: int = 30,
    dtype: torch.dtype = torch.float32,
) -> SimpleNamespace:
    """Requests with scattered slots in a pool that is NaN wherever no request has a token.

    Slot 0 is zero, as SGLang's dummy. The table holds ids beyond the pool past each length.
    """
    draw = torch.Generator().manual_seed(sum(queries) + 100 * sum(prefixes) + heads)
    lengths = [count + prefix for count, prefix in zip(queries, prefixes, strict=True)]
    slots = 1 + torch.randperm(sum(lengths) + spare, generator=draw)
    count = len(slots) + 1
    keys = torch.full((count, kv_heads, size), float("nan"), dtype=dtype)
    values = torch.full((count, kv_heads, value_size), float("nan"), dtype=dtype)
    used = slots[: sum(lengths)]
    keys[used] = torch.randn(len(used), kv_heads, size, generator=draw).to(dtype)
    values[used] = torch.randn(len(used), kv_heads, value_size, generator=draw).to(dtype)
    keys[0], values[0] = 0, 0
    requests = torch.randperm(len(queries) + 3, generator=draw)[: len(queries)]
    table = torch.where(torch.rand(len(queries) + 3, max(lengths) + 5, generator=draw) < 0.5, -7, 1)
    table = (table * 10**8).int()
    for row, own in zip(requests, used.split(lengths), strict=True):
        table[row, : len(own)] = own.int()
    return SimpleNamespace(
        queries=queries, prefixes=torch.tensor(prefixes).int(), lengths=torch.tensor(lengths),
        requests=requests, table=table, keys=keys, values=values, scale=size**-0.4,
        q=torch.randn(sum(queries), heads, size, generator=draw),
    )  # fmt: skip


def spans_of(batch: SimpleNamespace) -> list[Span]:
    return make_spans(batch.table, batch.requests, batch.queries, batch.prefixes, batch.lengths)


def attended(batch: SimpleNamespace, causal: bool = True, window: int = -1) -> Tensor:
    parts = [
        attend(batch.q[span.rows], batch.keys, batch.values, span, batch.scale, causal, window)
        for span in spans_of(batch)
    ]
    return torch.cat(parts)


def reference(batch: SimpleNamespace, causal: bool = True, window: int = -1) -> Tensor:
    """One softmax for each query over the keys that it may see, in float64."""
    queries, rows = iter(batch.q.double()), []
    for request, prefix, length in zip(batch.requests, batch.prefixes, batch.lengths, strict=True):
        for own in range(int(prefix), int(length)):
            begin = max(0, own - window) if causal and window >= 0 else 0
            slots = batch.table[request, begin : own + 1 if causal else length].long()
            group = batch.q.shape[1] // batch.keys.shape[1]
            keys = batch.keys[slots].double().repeat_interleave(group, dim=1)
            values = batch.values[slots].double().repeat_interleave(group, dim=1)
            weights = (torch.einsum("hd,lhd->hl", next(queries), keys) * batch.scale).softmax(-1)
            rows.append(torch.einsum("hl,lhe->he", weights, values).flatten())
    return torch.stack(rows)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    """Equal shapes, no NaN, and equal numbers."""
    assert found.shape == wanted.shape
    assert float((found.double() - wanted.double()).abs().max()) < tolerance


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 2)])
@pytest.mark.parametrize("window", [-1, 0, 3, 100])
@pytest.mark.parametrize("block", BLOCKS)
def test_causal_attention_equals_plain_formula(
    block: str, window: int, heads: tuple[int, int]
) -> None:
    batch = make_batch(*BLOCKS[block], heads=heads[0], kv_heads=heads[1])
    assert_close(attended(batch, True, window), reference(batch, True, window))


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (8, 2)])
@pytest.mark.parametrize("block", BLOCKS)
def test_draft_block_sees_prefix_and_whole_block(block: str, heads: tuple[int, int]) -> None:
    batch = make_batch(*BLOCKS[block], heads=heads[0], kv_heads=heads[1])
    assert_close(attended(batch, False), reference(batch, False))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("fields", [{"value_size": 5}, {"dtype": torch.bfloat16}])
def test_values_of_another_size_and_cache_of_another_precision(
    fields: dict[str, Any], block: str, causal: bool
) -> None:
    batch = make_batch(*BLOCKS[block], **fields)
    assert_close(attended(batch, causal), reference(batch, causal))


def test_requests_are_attended_to_together_unless_padding_doubles_the_work() -> None:
    groups = {name: len(spans_of(make_batch(*block))) for name, block in BLOCKS.items()}
    assert groups == {
        "decode, equal lengths": 1, "decode, similar lengths": 1,
        "decode, very different lengths": 4, "decode, one request": 1, "verify": 1,
        "verify, very different lengths": 3, "fresh prefill": 1,
        "fresh prefills of one length": 1, "chunk after a prefix": 1, "mixed extends": 4,
    }  # fmt: skip


def test_mask_of_a_padded_block() -> None:
    span = make_spans(
        torch.arange(12).view(2, 6), torch.tensor([0, 1]), [2, 2],
        torch.tensor([1, 3]), torch.tensor([3, 5]),
    )[0]  # fmt: skip
    assert span.slots.tolist() == [[0, 1, 2, 0, 0], [6, 7, 8, 9, 10]]

    def seen(causal: bool, window: int) -> list[list[str]]:
        mask = span.mask(causal, window)
        assert mask is not None and mask.shape == (2, 1, 2, 5)
        return [["".join(".x"[key] for key in row) for row in own] for own in mask[:, 0].int()]

    assert seen(False, -1) == [["xxx..", "xxx.."], ["xxxxx", "xxxxx"]]
    assert seen(True, -1) == [["xx...", "xxx.."], ["xxxx.", "xxxxx"]]
    assert seen(True, 1) == [["xx...", ".xx.."], ["..xx.", "...xx"]]


def test_no_mask_where_every_query_sees_every_key() -> None:
    assert spans_of(make_batch([1] * 3, [6] * 3))[0].mask(True, -1) is None
    assert spans_of(make_batch([4] * 3, [6] * 3))[0].mask(False, -1) is None
    assert spans_of(make_batch([4] * 3, [6] * 3))[0].mask(True, -1) is not None


@pytest.mark.parametrize("block", ["decode, similar lengths", "verify", "mixed extends"])
def test_pool_is_never_copied(block: str) -> None:
    """No step of it makes a tensor anywhere near the size of the pool."""
    batch = make_batch(*BLOCKS[block], spare=20_000)
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            made.extend(each.numel() for each in tree_leaves(out) if isinstance(each, Tensor))
            return out

    with Sizes():
        out = attended(batch)
    assert_close(out, reference(batch))
    assert 0 < max(made) < batch.keys.numel() / 50


def native(batch: SimpleNamespace, causal: bool, window: int, decode: bool) -> Tensor:
    """SGLang's own loop over requests."""
    backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    inputs = {
        "query": batch.q, "output": torch.empty_like(batch.q), "k_cache": batch.keys,
        "v_cache": batch.values, "req_to_token": batch.table, "req_pool_indices": batch.requests,
        "seq_lens": batch.lengths, "scaling": batch.scale, "enable_gqa": True, "causal": causal,
        "sliding_window_size": window,
    }  # fmt: skip
    if decode:
        return backend._run_sdpa_forward_decode(**inputs).flatten(1)
    counts = torch.tensor(batch.queries)
    return backend._run_sdpa_forward_extend(
        **inputs, extend_prefix_lens=batch.prefixes, extend_seq_lens=counts
    ).flatten(1)


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("block", BLOCKS)
def test_equals_sglangs_own_backend(block: str, window: int) -> None:
    batch = make_batch(*BLOCKS[block])
    assert_close(attended(batch, True, window), native(batch, True, window, False))
    if block.startswith("decode"):
        assert_close(attended(batch, True, window), native(batch, False, window, True))
    if window < 0:
        assert_close(attended(batch, False), native(batch, False, window, False))


def make_layer(**fields: Any) -> RadixAttention:
    return RadixAttention(**{**LAYER, **fields})


LAYER = {"num_heads": 4, "head_dim": 8, "scaling": 1.0, "num_kv_heads": 2, "layer_id": 1}
MODES = {
    "DECODE": "decode, similar lengths",
    "TARGET_VERIFY": "verify",
    "EXTEND": "mixed extends",
}


def runner_of(table: Tensor, pool: Any) -> SimpleNamespace:
    slots = SimpleNamespace(req_to_token=table)
    return SimpleNamespace(req_to_token_pool=slots, token_to_kv_pool=pool)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_backend_stores_new_tokens_and_attends(mode: str, kind: AttentionType) -> None:
    queries, prefixes = BLOCKS[MODES[mode]]
    batch = make_batch(queries, prefixes)
    pool = CpuKVPool(
        size=len(batch.keys) - 1, page_size=1, dtype=torch.float32, head_num=2, head_dim=8,
        layer_num=2, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    parts = zip(batch.requests, prefixes, batch.lengths, strict=True)
    new = torch.cat([batch.table[row, begin:end].long() for row, begin, end in parts])
    for whole, stored in ((batch.keys, pool.k_buffer[1]), (batch.values, pool.v_buffer[1])):
        stored.copy_(whole)
        stored[new] = float("nan")  # only the backend can fill these
    verify = mode == "TARGET_VERIFY"
    info = SimpleNamespace(
        forward_mode=ForwardMode[mode], req_pool_indices=batch.requests, out_cache_loc=new,
        seq_lens=batch.prefixes.long() if verify else batch.lengths,
        spec_info=SimpleNamespace(draft_token_num=4) if verify else None,
        extend_seq_lens=torch.tensor(queries).int(), extend_prefix_lens=batch.prefixes,
    )  # fmt: skip
    backend = CpuAttention(runner_of(batch.table, pool))
    backend.init_forward_metadata(info)
    layer = make_layer(scaling=batch.scale, attn_type=kind, sliding_window_size=3)
    out = backend.forward(batch.q.flatten(1), batch.keys[new], batch.values[new], layer, info)
    assert_close(out, reference(batch, kind == AttentionType.DECODER, 3))
    again = backend.forward(batch.q.flatten(1), None, None, layer, info, save_kv_cache=False)
    assert torch.equal(out, again)
    assert not pool.k_buffer[0].any() and not pool.v_buffer[0].any()


def test_idle_batch_has_nothing_to_attend_to() -> None:
    pool = SimpleNamespace(get_key_buffer=lambda _: None, get_value_buffer=lambda _: None)
    backend = CpuAttention(runner_of(torch.zeros(1, 1).int(), pool))
    info = SimpleNamespace(forward_mode=ForwardMode.IDLE, seq_lens=torch.zeros(0, dtype=torch.long))
    backend.init_forward_metadata(info)
    layer = make_layer(v_head_dim=6)
    assert backend.forward(torch.zeros(0, 32), None, None, layer, info).shape == (0, 24)
    assert not backend.support_triton()


@pytest.mark.parametrize(
    ("fields", "given", "named"),
    [
        ({"logit_cap": 30.0}, {}, "a logit cap of 30.0"),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({}, {"sinks": 1, "k_rope": None, "aux": 2}, "aux, sinks"),
        ({"logit_cap": 5.0}, {"sinks": 1}, "sinks, a logit cap of 5.0"),
    ],
)
def test_what_is_not_computed_is_refused(
    fields: dict[str, Any], given: dict[str, Any], named: str
) -> None:
    CpuAttention._refuse(make_layer(), {"sinks": None})
    layer = make_layer(**fields)
    with pytest.raises(NotImplementedError) as caught:
        CpuAttention._refuse(layer, given)
    assert str(caught.value) == (
        f"the CPU attention backend does not support {named}, which this target needs."
    )


def test_pool_with_a_part_for_sliding_windows_is_refused() -> None:
    pool = SWAKVPool.__new__(SWAKVPool)
    with pytest.raises(ValueError, match="add --disable-hybrid-swa-memory"):
        CpuAttention(runner_of(torch.zeros(1, 1), pool))
