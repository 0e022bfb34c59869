"""The contract inside the scheduler: what was loaded against the draft's folder, before serving."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from domino_kit.config import DraftConfig, read_config
from domino_kit.contract import Contract, check_allowed
from domino_kit.draft_contract import explain_layer_ids, weights_identity
from domino_kit.fingerprint import model_folder, sampled_rows
from domino_kit.manifest import MANIFEST_NAME
from domino_kit.modeling import rope_tables
from domino_kit.serve.live_weights import check_draft_weights, check_target_matrices
from domino_kit.serve.plugin import ALLOW_VARIABLE, CONTRACT_VARIABLE

MODES = ("stop", "report")
FACTS = (
    "layer_ids", "mask_token_id", "label_mode", "block_size", "head_active", "candidate_pool",
    "rope_table", "attention", "draft_weights", "draft_quantization", "draft_dtype", "embedding",
    "head_weights",
)  # fmt: skip
TABLE_POSITIONS = 4096
"""Positions of a rotary table that are compared, evenly spread; a wrong base shows at all."""
TABLE_TOLERANCE = 1e-5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """What happens with a difference."""

    mode: str
    allowed: tuple[str, ...]


def read_policy(environ: Mapping[str, str]) -> Policy:
    """The policy of this process; ``ValueError`` for a mode or fact that does not exist."""
    mode = environ.get(CONTRACT_VARIABLE) or "stop"
    if mode not in MODES:
        raise ValueError(f"{CONTRACT_VARIABLE} is {mode!r}; use {' or '.join(MODES)}.")
    names = [name.strip() for name in environ.get(ALLOW_VARIABLE, "").split(",")]
    try:
        return Policy(mode, check_allowed([name for name in names if name]))
    except ValueError as error:
        raise ValueError(f"{ALLOW_VARIABLE}: {error}") from None


def check_worker(_result: Any, worker: Any, *_: Any) -> None:
    """After ``init_cuda_graphs``, the worker's last step before serving.

    Keeps the findings and the draft's identity on the worker, and logs one line for each finding.
    Raises ``ValueError`` with the first error, which ends the server, unless it is allowed or the
    mode is ``report``.
    """
    policy = read_policy(os.environ)
    contract = compare(worker)
    contract.allow(policy.allowed)
    worker.domino_contract, worker.domino_weights = contract, _files_identity(worker)
    if not contract.checked:
        logger.warning("domino-kit contract: not compared: %s", contract.unchecked[0])
    for finding in contract.findings:
        level = logging.ERROR if finding.severity == "error" else logging.WARNING
        logger.log(level, "domino-kit contract: %s: %s", finding.name, finding.message)
    if policy.mode == "stop":
        contract.stop()


def _files_identity(worker: Any) -> str | None:
    """Of the files that were loaded (``check_draft_weights`` compares them with what serves)."""
    folder = model_folder(str(worker.server_args.speculative_draft_model_path))
    try:
        return None if folder is None else weights_identity(folder)
    except ValueError:
        return None  # already a finding, or said not to be compared


def live_report(worker: Any) -> dict[str, Any] | None:
    """What was found, and the mode, for ``/server_info``; ``None`` if nothing was compared."""
    contract = vars(worker).get("domino_contract")  # its __getattr__ asks the target's worker
    if contract is None:
        return None
    _check_drafted_block(contract, worker)
    return {"mode": read_policy(os.environ).mode, **contract.to_json()}


def compare(worker: Any) -> Contract:
    """Compare a loaded DFLASH worker with its draft's folder, and with fresh computations.

    A draft of another kind, whose config domino-kit does not read, is not compared at all.
    """
    contract = Contract()
    name = str(worker.server_args.speculative_draft_model_path)
    folder = model_folder(name)
    try:
        if folder is None:
            raise ValueError(f"draft {name!r} is no folder on this machine.")
        config = read_config(folder / "config.json")
    except ValueError as error:
        if folder is not None and (folder / MANIFEST_NAME).exists():  # it was readable once
            contract.error("config", str(error))
        for fact in FACTS:
            contract.could_not(fact, str(error))
        return contract
    _check_worker_facts(contract, worker, config)
    _check_layers(contract, worker, config)
    _check_attention(contract, worker)
    _check_tables(contract, worker, config)
    _check_runners(contract, worker)
    if int(worker.server_args.tp_size) > 1:
        for fact in ("draft_weights", "embedding", "head_weights"):
            contract.could_not(fact, "each process has only a part of a weight")
        return contract
    check_draft_weights(contract, worker.draft_model, folder)
    check_target_matrices(contract, worker.model_runner, folder)
    return contract


# -- alignment -----------------------------------------------------------------------------------


def _check_worker_facts(contract: Contract, worker: Any, config: DraftConfig) -> None:
    """What the worker decided from the draft's config, against our reading of it."""
    model = worker.draft_model
    facts = {
        "mask_token_id": (int(worker._mask_token_id), config.mask_token_id),
        "label_mode": (bool(model.shift_label), config.shift_label),
        "block_size": (int(worker.block_size), config.block_size),
        "head_active": (bool(worker._is_domino and model.prefix_gru is not None), config.has_head),
    }
    for name, (served, trained) in facts.items():
        contract.looked_at(name)
        if served != trained:
            contract.error(name, _differs(name, served, trained))
    contract.looked_at("candidate_pool")
    pool = int(worker.domino_candidate_pool_size)
    if config.has_head and 0 < pool < config.vocab_size:
        contract.warning(
            "candidate_pool",
            f"the served head chooses among {pool} tokens, but the draft is measured over all "
            f"{config.vocab_size}; --speculative-domino-candidate-pool-size 0 serves the same.",
        )


def _differs(name: str, served: Any, trained: Any) -> str:
    what = {
        "mask_token_id": "blocks are filled with token {0}, but the draft was trained with {1}",
        "label_mode": "the server reads rows with shift_label {0}, but the draft has {1}",
        "block_size": "the server drafts blocks of {0} rows, but the draft was trained with {1}, "
        "all of which see each other",
        "head_active": "the Domino head is active: {0}, but by the draft's config it is: {1}",
    }[name]
    return what.format(served, trained) + "."


def _check_drafted_block(contract: Contract, worker: Any) -> None:
    """The fill of the last block that was drafted; its buffer exists from the first one on."""
    blocks = getattr(worker, "_draft_block_ids_buf", None)
    known = {finding.name for finding in contract.findings}
    if blocks is None or "mask_token_id" in known or "mask_token_id" not in contract.checked:
        return
    found, wanted = blocks[0, 1:].unique().tolist(), int(worker._mask_token_id)
    if found != [wanted]:
        contract.error(
            "mask_token_id",
            f"the last block drafted was filled with tokens {found}, not with the mask {wanted}.",
        )


def _check_layers(contract: Contract, worker: Any, config: DraftConfig) -> None:
    """SGLang numbers a layer's output i + 1, and captures in the order in which layers run."""
    found = {
        tuple(sorted(int(place) - 1 for place in module.layers_to_capture))
        for module in worker.model_runner.model.modules()
        if getattr(module, "layers_to_capture", None)
    }
    if len(found) != 1:
        contract.could_not("layer_ids", "the target does not say which layers it captures")
        return
    contract.looked_at("layer_ids")
    served, trained = list(found.pop()), list(config.target_layer_ids)
    if served != trained:
        contract.error(
            "layer_ids",
            f"the server captures the outputs of layers {served}, in this order, but the draft "
            f"reads {trained}: {explain_layer_ids(served, trained)}.",
        )


# -- the draft's arithmetic ----------------------------------------------------------------------


def _check_attention(contract: Contract, worker: Any) -> None:
    """Full attention over the whole context, in both directions inside the block."""
    contract.looked_at("attention")
    window = worker.draft_window_size
    if window is not None:
        contract.error(
            "attention",
            f"the draft sees only a window of {window} positions; it was trained with all: leave "
            "--speculative-dflash-draft-window-size out.",
        )
    for place, layer in enumerate(worker.draft_model.layers):
        attention = layer.self_attn.attn
        kind, width = attention.attn_type.value, int(attention.sliding_window_size)
        if kind != "encoder_only" or width >= 0:
            contract.error(
                "attention",
                f"draft layer {place} attends as {kind!r} with window {width}; it was trained to "
                "see everything in both directions.",
            )
            return


def _check_tables(contract: Contract, worker: Any, config: DraftConfig) -> None:
    """Each layer's rotary table against a fresh one in float32."""
    contract.looked_at("rope_table")
    seen: list[Any] = []  # layers of one shape share their table
    for place, layer in enumerate(worker.draft_model.layers):
        rotary = layer.self_attn.rotary_emb
        if any(rotary is each for each in seen):
            continue
        seen.append(rotary)
        said = _compare_table(rotary, config)
        if said is not None:
            contract.error("rope_table", f"draft layer {place}: {said}.")
            return
        dtype = rotary.cos_sin_cache.dtype
        if dtype != torch.float32:
            contract.warning(
                "rope_table", f"draft layer {place} has a rotary table rounded to {dtype}."
            )
            return


def _compare_table(rotary: Any, config: DraftConfig) -> str | None:
    """What is wrong with SGLang's table ``[positions, cos | sin]``, ``None`` if nothing is.

    The fresh table is rounded as the served one, so that only other angles count.
    """
    if int(rotary.rotary_dim) != config.head_dim or not rotary.is_neox_style:
        return (
            f"{rotary.rotary_dim} of {config.head_dim} channels are rotated, in "
            f"{'halves' if rotary.is_neox_style else 'neighbouring pairs'}; it was trained with "
            "all of them, in halves"
        )
    table = rotary.cos_sin_cache
    places = torch.tensor(sampled_rows(len(table), TABLE_POSITIONS), device=table.device)
    cos, sin = rope_tables(places[None], config.head_dim, config.rope_theta)
    half = config.head_dim // 2
    fresh = torch.cat([cos[0, 0, :, :half], sin[0, 0, :, :half]], dim=-1).to(table.dtype)
    error = float((table[places].float() - fresh.float()).abs().max())
    if error < TABLE_TOLERANCE:
        return None
    return (
        f"its rotary table is off by up to {error:.1e} from base {config.rope_theta:g}, computed "
        f"in float32 (the server's base is {getattr(rotary, 'base', 'unknown')})"
    )


def _check_runners(contract: Contract, worker: Any) -> None:
    draft, target = worker.draft_model_runner, worker.model_runner
    contract.looked_at("draft_quantization", "draft_dtype")
    method = draft.model_config.quantization
    if method is not None:
        contract.error(
            "draft_quantization",
            f"the draft is served with {method} quantisation, which it was not trained for; pass "
            "--speculative-draft-model-quantization unquant.",
        )
    if draft.dtype != target.dtype:
        contract.error(
            "draft_dtype",
            f"the draft runs in {draft.dtype} and the target in {target.dtype}, so what passes "
            "between them is rounded.",
        )
