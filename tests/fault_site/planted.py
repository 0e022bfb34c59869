"""Faults that can be planted in SGLang or in domino-kit: an expression, and a wrong one for it."""

from typing import NamedTuple

WORKER = "sglang.srt.speculative.dflash_worker_v2"
DRAFT = "sglang.srt.models.dflash"
LLAMA = "sglang.srt.models.llama"
SERVED, ROLLOUT = "domino_kit.serve.cpu_rollout", "domino_kit.rollout"


class Edit(NamedTuple):
    """One changed expression. ``before`` and ``after`` are the text around it; together they must
    occur ``count`` times in the module."""

    fault: str
    module: str
    right: str
    wrong: str
    before: str = ""
    after: str = ""
    count: int = 1

    def apply(self, source):
        """The source with the right expression replaced by a choice between both."""
        text = self.before + self.right + self.after
        assert source.count(text) == self.count, (
            f"{self.fault}: {text!r} is there {source.count(text)} times in {self.module}"
        )
        force = f"__import__('sys').planted_fault({self.fault!r})"
        choice = f"(({self.wrong}) if {force} else ({self.right}))"
        return source.replace(text, self.before + choice + self.after)


PLANTED = [
    # SGLang's worker
    Edit(
        "served_positions", WORKER, "positions", "positions + 1",
        before="            positions=", after=",\n            input_embeds=input_embeds",
    ),
    Edit("served_embeds_scaled", WORKER, "embed_module(block_ids)", "embed_module(block_ids) * 1.5"),
    Edit(
        "served_mask", WORKER, "int(self._mask_token_id)", "5",
        before="        else:\n            block_ids.fill_(", after=")",
    ),
    Edit(
        "served_cache_not_advanced", WORKER, "commit_lens",
        "commit_lens * (commit_lens == int(self.block_size))",
        before="cache_loc.view(verify_out_cache_loc_2d.shape),\n            positions=positions,\n"
        "            commit_lens=",
        after=",\n        )\n\n        # Avoid copying",
    ),
    Edit(
        "served_stale_prefix", WORKER, "self._draft_write_ids(kv_loc_plan)",
        "__import__('planted').stale_prefix(self, batch, kv_loc_plan)",
        before="                cache_loc=", after=",\n                positions=positions,\n",
    ),
    # SGLang's draft and target models
    Edit(
        "served_rope_rounded", DRAFT, "self.rotary_emb(positions, dummy_q, k)",
        "__import__('planted').rounded_rope(self.rotary_emb, positions, dummy_q, k)",
    ),
    Edit(
        "served_no_norm", DRAFT, "self.norm(hidden_states, residual)",
        "(hidden_states + residual, None)",
    ),
    Edit("served_layers", LLAMA, "i in self.layers_to_capture", "i + 1 in self.layers_to_capture"),
    Edit(
        "served_layer_order", LLAMA, "aux_hidden_states",
        "type(aux_hidden_states)(aux_hidden_states[::-1])",
        before="        return hidden_states, ", after="\n\n    # If this function",
    ),
    # the CPU platform
    Edit(
        "served_embeds_rounded", "domino_kit.serve.plugin", "embeds.to(runner.dtype)",
        "embeds.bfloat16().to(runner.dtype)",
    ),
    Edit(
        "served_causal", "domino_kit.serve.attention",
        "layer.attn_type != AttentionType.ENCODER_ONLY", "True",
    ),
    Edit("served_label_mode", SERVED, "0 if shift_label else 1", "1 if shift_label else 0"),
    Edit(
        "served_gru_late", ROLLOUT, "head.next_state(previous, state)",
        "head.next_state(tokens[-2] if tokens[1:] else anchor_tokens, state) if states "
        "else rows.new_zeros(len(rows), head.gru.hidden_size)",
    ),
    Edit("served_gru_reset", ROLLOUT, "state", "None", before="(previous, ", after=")"),
    Edit("served_concat_order", ROLLOUT, "inner.weight[:, :size]", "inner.weight[:, -size:]"),
    Edit("served_concat_order", ROLLOUT, "inner.weight[:, size:]", "inner.weight[:, :-size]"),
    Edit("served_head_ignored", ROLLOUT, "add_product(logits, hidden, last.weight)", "logits"),
    Edit("served_pool", SERVED, "candidate_pool_size", "8", before="pool_size=", after=","),
    # while loading: all at once, in a server of their own
    Edit(
        "loaded_wrong", "sglang.srt.layers.rotary_embedding.base", "self._compute_cos_sin_cache()",
        "self._compute_cos_sin_cache().bfloat16().float()", before="        cache = ",
    ),
    Edit(
        "loaded_wrong", LLAMA, "val + 1", "val", before="[", after=" for val in layer_ids]",
        count=2,
    ),
    Edit(
        "loaded_wrong", DRAFT, "weights", "__import__('planted').quantised(weights)",
        before="        for name, loaded_weight in ", after=":\n            unprefixed_name",
    ),
]  # fmt: skip


def rounded_rope(rotary, positions, query, key):
    """A rotary embedding whose table is rounded to bfloat16 for one call."""
    right = rotary.cos_sin_cache
    rotary.cos_sin_cache = right.bfloat16().to(right.dtype)
    try:
        return rotary(positions, query, key)
    finally:
        rotary.cos_sin_cache = right


def stale_prefix(worker, batch, plan):
    """The slots to write, after the draft's entries of every cached prefix were spoilt."""
    table = worker.model_runner.req_to_token_pool.req_to_token
    pool = worker.draft_model_runner.token_to_kv_pool
    for row, length in zip(batch.req_pool_indices.tolist(), batch.prefix_lens, strict=True):
        slots = table[row, : int(length)].long()
        for layer in range(len(worker.draft_model.layers)):
            pool.get_key_buffer(layer)[slots] *= -0.5
            pool.get_value_buffer(layer)[slots] *= -0.5
    return worker._draft_write_ids(plan)


def quantised(weights):
    """Weights rounded to steps of a 127th of their largest value, as int8 would."""
    for name, weight in weights:
        step = weight.abs().max() / 127
        yield name, (weight / step).round() * step
