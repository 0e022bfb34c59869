"""SGLang's DFLASH worker on a CPU: exact verification of sampled requests, and plain steps."""

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from torch import Tensor

from domino_kit.serve.cpu_cache import gather_slots
from domino_kit.serve.plugin import PLAIN_PARAM


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
    drop = (ranks >= sampling.top_ks.view(-1, 1, 1)) | (before > sampling.top_ps.view(-1, 1, 1))
    if sampling.need_min_p_sampling:
        drop |= ordered < ordered[..., :1] * sampling.min_ps.view(-1, 1, 1)
    kept = ordered.masked_fill(drop, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    sampled = torch.zeros_like(probs).scatter_(-1, order, kept)
    # Softmax can make two logits equal; the greedy choice is made before it.
    best = torch.zeros_like(probs).scatter_(-1, grouped.argmax(-1, keepdim=True), 1.0)
    return torch.where(sampling.top_ks.view(-1, 1, 1) == 1, best, sampled)


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

    def forward_batch_generation(self, batch: Any, on_publish: Any = None, **rest: Any) -> Any:
        """One scheduler step, upstream's, or a plain one where every request asked for that."""
        if self._is_plain(batch):
            return self._plain_step(batch, on_publish)
        return super().forward_batch_generation(batch, on_publish=on_publish, **rest)

    @staticmethod
    def _is_plain(batch: Any) -> bool:
        if not batch.forward_mode.is_decode() or batch.is_extend_in_batch or batch.has_grammar:
            return False
        params = [request.sampling_params.custom_params or {} for request in batch.reqs]
        return all(each.get(PLAIN_PARAM) is False for each in params)

    def _plain_step(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        """One token for each request: upstream's verify pass over a block of the anchor alone.

        The draft's cache is kept up, so that later requests may reuse the prefix.
        """
        anchors, positions = batch.spec_info.bonus_tokens, batch.seq_lens.clone()
        slots = gather_slots(
            batch.req_pool_indices, self.model_runner.req_to_token_pool.req_to_token,
            positions, positions + 1, len(positions), 1, self.device,
        )  # fmt: skip
        plan = self.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=positions,
            seq_lens_cpu=batch.seq_lens_cpu,
            write_virtual=slots,
            read_extent=1,
        )
        batch.out_cache_loc = slots
        verify = DFlashVerifyInput(
            draft_token=anchors, positions=positions, draft_token_num=1, kv_loc_plan=plan
        )
        forward_batch, _ = verify.prepare_for_verify(batch, self.target_worker)
        result = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        output = result.logits_output
        bonus = self._next_tokens(output.next_token_logits, batch.sampling_info)
        if batch.return_logprob:
            compute_spec_logprobs(batch, output, bonus, chain_stride=1)
        ones = torch.ones_like(positions, dtype=torch.int32)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=output.hidden_states,
            cache_loc=self._draft_write_ids(plan),
            cache_loc_2d=self._draft_write_ids(plan).view(-1, 1),
            positions=positions,
            commit_lens=ones,
        )
        output.hidden_states = None
        new_seq_lens = positions + 1
        if on_publish is not None:
            on_publish(new_seq_lens)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=bonus,
            accept_lens=ones,
            can_run_cuda_graph=False,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=1,
            new_seq_lens=new_seq_lens,
        )

    @staticmethod
    def _next_tokens(logits: Tensor, sampling: Any) -> Tensor:
        """The next token of each request from ``[B, V]`` logits: greedy or sampled."""
        if sampling is None:
            return logits.argmax(-1)
        apply_dflash_verify_logits_adjustments(
            next_token_logits=logits, sampling_info=sampling, draft_token_num=1
        )
        if sampling.is_all_greedy:
            return logits.argmax(-1)
        return torch.multinomial(target_probabilities(logits, sampling, 1)[:, 0], 1)[:, 0]
