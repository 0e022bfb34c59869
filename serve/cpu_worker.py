"""SGLang's DFLASH worker on a CPU: exact verification of sampled requests, and plain steps."""

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from torch import Tensor

PLAIN_PARAM = "speculate"
"""A request whose ``custom_params`` say ``{"speculate": false}`` is decoded without the draft."""


def target_probabilities(logits: Tensor, sampling: Any, rows_per_request: int) -> Tensor:
    """What SGLang's own PyTorch sampler would draw from, float32 ``[B, rows, V]``.

    ``logits`` is ``[B * rows, V]``; ``sampling`` is SGLang's ``SamplingBatchInfo``. Temperature,
    top-k, top-p and min-p in the order and with the bounds of
    ``top_k_top_p_min_p_sampling_from_probs_torch``. A greedy request has all mass on its argmax.
    """
    requests = logits.shape[0] // rows_per_request
    grouped = logits.float().view(requests, rows_per_request, -1)
    probs = (grouped / sampling.temperatures.view(-1, 1, 1)).softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ranks = torch.arange(ordered.shape[-1])
    drop = ranks >= sampling.top_ks.view(-1, 1, 1)
    drop |= before > sampling.top_ps.view(-1, 1, 1)
    if sampling.need_min_p_sampling:
        drop |= ordered < ordered[..., :1] * sampling.min_ps.view(-1, 1, 1)
    kept = ordered.masked_fill(drop, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, kept)


def accept_sampled(candidates: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """How many drafts stand, ``[B]``, and the bonus token, ``[B]``, for greedy proposals.

    ``candidates [B, K]`` start with the anchor; ``probs [B, K, V]``. A draft stands with its
    target probability; at the first that does not, the bonus is drawn from the target without
    that token, and after the last from the target: the case of a point-mass draft in Leviathan
    et al. (arXiv:2211.17192), which keeps the target's distribution exactly.
    """
    drafts = candidates[:, 1:]
    chance = probs[:, :-1].gather(2, drafts[:, :, None])[:, :, 0]
    stands = torch.rand(chance.shape) < chance
    accepted = stands.long().cumprod(1).sum(1)
    rows = torch.arange(len(candidates))
    own = probs[rows, accepted]
    rejected = accepted < drafts.shape[1]
    refused = drafts.gather(1, accepted.clamp(max=drafts.shape[1] - 1)[:, None])
    rest = own.scatter(1, refused, 0.0)
    # Where rounding left nothing but the refused token, the target's own distribution is right.
    usable = rejected & (rest.sum(-1) > 0)
    bonus = torch.multinomial(torch.where(usable[:, None], rest, own), 1)[:, 0]
    return accepted, bonus


class CpuDFlashWorker(DFlashWorkerV2):
    """The upstream worker with what it does only on CUDA done in PyTorch."""

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Upstream warns here that sampled requests are verified greedily; ours are not."""

    def _accept_block(self, **arguments: Any) -> Any:
        """Greedy batches as upstream; with any sampled request, exact sampled verification."""
        sampling = arguments["sampling_info"]
        if sampling is None or sampling.is_all_greedy:
            return super()._accept_block(**arguments)
        candidates, logits = arguments["candidates"], arguments["next_token_logits"]
        probs = target_probabilities(logits, sampling, candidates.shape[1])
        accepted, bonus = accept_sampled(candidates, probs)
        tokens = torch.cat([candidates[:, 1:], torch.zeros_like(candidates[:, :1])], dim=1)
        tokens.scatter_(1, accepted[:, None], bonus[:, None])
        return accepted.int(), accepted.int() + 1, bonus, tokens, None
