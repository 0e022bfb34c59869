"""The SGLang plugin: the name DOMINO, the draft's precision, and what it reports about itself."""

import importlib.metadata
import logging
import os
import sys
from pathlib import Path
from typing import Any

from domino_kit import __version__
from domino_kit.serve.versions import check_version

PLATFORM_NAME = "domino_cpu"
REPORT_KEY = "domino_kit"
PLAIN_PARAM = "speculate"
"""A request whose ``custom_params`` say ``{"speculate": false}`` is decoded without the draft, as
long as all requests beside it are: the measure of what the draft gains on the same server."""
TRACE_PARAM = "trace"
"""A request whose ``custom_params`` say ``{"trace": NAME}`` is traced, to ``FOLDER/NAME``."""
PROBE_VARIABLE = "DOMINO_KIT_PROBE"
"""Environment variable of a server: the FOLDER of its traces. Not set: nothing can be traced."""
CONTRACT_VARIABLE = "DOMINO_KIT_CONTRACT"
"""``stop`` (the default) ends a server with an error that is not allowed; ``report`` never does."""
ALLOW_VARIABLE = "DOMINO_KIT_ALLOW"
"""Names of facts, with commas between, whose difference is said and accepted."""
HIDDEN_VARIABLE = "DOMINO_KIT_LAST_HIDDEN"
"""Set for a server of features: last hidden rows stand behind the captured layers' outputs."""
CPU_POOL_TOKENS = 32768
"""Slots of a CPU server's KV pool unless flags say otherwise: SGLang would size it by the machine's
memory as if that were a GPU's, and take most of it."""

logger = logging.getLogger(__name__)


def activate_platform() -> str | None:
    """Entry point ``sglang.srt.platforms``: only ever active by name."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return "domino_kit.serve.cpu_platform:CpuPlatform"


def activate() -> None:
    """Entry point ``sglang.srt.plugins``, called in every process of a server.

    Stays out, with one line, on a version of SGLang that it was not tested with.
    """
    complaint = check_version(importlib.metadata.version("sglang"), os.environ)
    if complaint is not None:
        logger.warning("%s The plugin stays out.", complaint)
        return
    _register_name()
    on_cpu = os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME
    if on_cpu:
        _register_cpu_arguments()
    # Tokenizer and detokenizer processes run no model; hooks there would only import one.
    if "sglang.srt.managers.scheduler" in sys.modules:
        _register_scheduler_hooks(on_cpu)


def _register_name() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    # The first step that may change the algorithm's name, before anything reads it.
    register_resolution_hook("handle_aux_hidden_state_capture")(resolve_domino_name)


def _register_cpu_arguments() -> None:
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
    )
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from domino_kit.serve.cpu_hooks import set_cpu_defaults

    add_attention_backend_choices([PLATFORM_NAME])
    add_draft_attention_backend_choices([PLATFORM_NAME])
    register_resolution_hook("handle_cpu_backends")(set_cpu_defaults)


def _register_scheduler_hooks(on_cpu: bool) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        keep_precision,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.internal_state"
        ".SchedulerInternalStateController.get_internal_state",
        add_report,
        HookType.AFTER,
    )
    from domino_kit.serve.live import check_worker

    # A draft worker's last step before serving: weights, captured layers and tables are final.
    HookRegistry.register(
        "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.init_cuda_graphs",
        check_worker,
        HookType.AFTER,
    )
    if on_cpu:
        from domino_kit.serve.cpu_hooks import register_cpu_hooks

        register_cpu_hooks()
    if os.environ.get(HIDDEN_VARIABLE):
        HookRegistry.register(
            "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store",
            add_last_hidden,
            HookType.AROUND,
        )
    folder = os.environ.get(PROBE_VARIABLE)
    if folder:
        from domino_kit.serve.probe import register_probe

        register_probe(Path(folder), on_cpu=on_cpu)


def resolve_domino_name(server_args: Any, previous: Any) -> None:
    """Let ``--speculative-algorithm DOMINO`` stand for DFLASH with a Domino head.

    SGLang compares the string "DFLASH" in many places, so the name is resolved before any of them.
    Raises ``ValueError`` for a draft without a head.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    config = resolving_view(server_args)
    if (config.speculative_algorithm or "").upper() == "DOMINO":
        if config.speculative_draft_model_path is None:
            raise ValueError(
                "--speculative-algorithm DOMINO needs --speculative-draft-model-path, a Domino "
                "draft's folder."
            )
        if not _has_head(config):
            raise ValueError(
                f"{config.speculative_draft_model_path} has no Domino head (projector_type is not "
                "'domino' in its config.json); serve it with --speculative-algorithm DFLASH."
            )
        declare_resolution(server_args, "domino_kit", speculative_algorithm="DFLASH")
    previous(server_args)


def _has_head(config: Any) -> bool:
    """What SGLang itself will make of the draft's config."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    draft = get_config(
        config.speculative_draft_model_path,
        trust_remote_code=config.trust_remote_code,
        revision=config.speculative_draft_model_revision,
    )
    return bool(parse_dflash_draft_config(draft_hf_config=draft).is_domino)


def keep_precision(kwargs: dict[str, Any], runner: Any, forward_batch: Any, *_: Any) -> None:
    """Undo SGLang's rounding of a draft block's embeddings to bfloat16 in any other dtype.

    The embeddings are the target's own rows, so in float32 the rounding makes the served draft
    see other inputs than the trained one.
    """
    embeds = forward_batch.input_embeds
    if embeds is not None and runner.is_draft_worker and runner.spec_algorithm.is_dflash():
        kwargs["input_embeds"] = embeds.to(runner.dtype)


def add_last_hidden(
    original: Any, processor: Any, hidden: Any, before_norm: Any, captured: Any, *others: Any
) -> Any:
    """Put the normed last hidden rows behind the captured layers: SGLang keeps both, returns one.

    Most models cannot name their last layer among the captured ones.
    """
    import torch

    stored = original(processor, hidden, before_norm, captured, *others)
    if stored is None or captured is None or stored.shape[0] != hidden.shape[0]:
        return stored
    return torch.cat([stored, hidden], dim=-1)


def add_report(output: Any, controller: Any, *_: Any) -> None:
    """Add what is being served to ``/server_info``, so that a client can verify it."""
    output.internal_state[REPORT_KEY] = describe_scheduler(controller.scheduler)


def describe_scheduler(scheduler: Any) -> dict[str, Any]:
    """The facts of the loaded draft, read from the live worker."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins.hook_registry import HookRegistry

    from domino_kit.serve.live import live_report

    folder = os.environ.get(PROBE_VARIABLE)
    report: dict[str, Any] = {
        "version": __version__,
        "platform": current_platform.device_name,
        "process_group": os.getpgrp(),
        "hooks_missing": sorted(set(HookRegistry._hooks) - HookRegistry._patched),
        "probe": str(Path(folder).absolute()) if folder else None,
    }
    worker = scheduler.draft_worker
    if worker is None or not scheduler.spec_algorithm.is_dflash():
        return {**report, "draft": None, "contract": None}
    model = worker.draft_model
    report["draft"] = {
        "head": bool(worker._is_domino and model.prefix_gru is not None),
        "block_size": int(worker.block_size),
        "mask_token_id": int(worker._mask_token_id),
        "shift_label": bool(model.shift_label),
        "candidate_pool_size": int(worker.domino_candidate_pool_size),
        "target_layer_ids": list(model.draft_config.target_layer_ids or []),
        "plain_requests": hasattr(type(worker), "_plain_step"),
        "dtype": str(worker.draft_model_runner.dtype).removeprefix("torch."),
        "weights": vars(worker).get("domino_weights"),
    }
    report["contract"] = live_report(worker)
    return report
