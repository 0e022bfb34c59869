"""Functions of SGLang without a platform seam that assume a GPU, and what a CPU does instead."""

from typing import Any

from torch import Tensor

from domino_kit.serve.plugin import CPU_POOL_TOKENS, PLATFORM_NAME


def set_cpu_defaults(server_args: Any, previous: Any) -> None:
    """In place of SGLang's ``handle_cpu_backends``, which picks Intel's kernels.

    What a user would otherwise have to know and type. Another attention backend or pool size wins
    where it is given; sampling in PyTorch and no overlap are all that works.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    given = resolving_view(server_args)
    default_pool = CPU_POOL_TOKENS if given.mem_fraction_static is None else None
    declare_resolution(
        server_args,
        PLATFORM_NAME,
        attention_backend=given.attention_backend or PLATFORM_NAME,
        sampling_backend="pytorch",
        max_total_tokens=given.max_total_tokens or default_pool,
        disable_overlap_schedule=True,  # a CPU has nothing to overlap with
    )


def register_cpu_hooks() -> None:
    """Register every replacement with SGLang's hook registry; called by the plugin."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from domino_kit.serve.cpu_cache import write_slots
    from domino_kit.serve.cpu_rollout import cpu_rollout

    # Both launch a Triton kernel whatever the platform says about Triton.
    allocation = "sglang.srt.mem_cache.allocation"
    HookRegistry.register(
        f"{allocation}.assign_req_to_token_pool_func", write_slots, HookType.REPLACE
    )
    HookRegistry.register(f"{allocation}.get_last_loc", get_last_loc_torch, HookType.REPLACE)
    # Refuses every device but CUDA and every dtype but bfloat16.
    HookRegistry.register(
        "sglang.srt.speculative.domino_utils.validate_domino_runtime",
        check_domino_runtime,
        HookType.REPLACE,
    )
    # The same proposals from products that suit a CPU.
    HookRegistry.register(
        "sglang.srt.speculative.domino_utils.domino_greedy_rollout", cpu_rollout, HookType.REPLACE
    )
    HookRegistry.register(
        "sglang.srt.speculative.dflash_utils.validate_dflash_request",
        refuse_inexact,
        HookType.AROUND,
    )
    # The worker marks tensors as used by a stream; a CPU tensor has none and PyTorch raises.
    HookRegistry.register("torch.Tensor.record_stream", record_stream, HookType.AROUND)


def check_domino_runtime(
    *,
    target_vocab_size: int,
    draft_vocab_size: int,
    hidden_size: int,
    tp_size: int,
    target_embedding: Any,
    lm_head: Any,
    prefix_gru: Any,
    embed_proj: Any,
    **_: Any,
) -> None:
    """The shapes that a Domino rollout relies on, in any floating type.

    Raises ``ValueError`` naming what does not fit.
    """
    embedding, head = target_embedding.weight, lm_head.weight
    facts = {
        "tensor parallel size": (tp_size, 1),
        "the draft's vocabulary": (draft_vocab_size, target_vocab_size),
        "the embedding's width": (embedding.shape[-1], hidden_size),
        "the output head's width": (head.shape[-1], hidden_size),
        "the GRU's input": (prefix_gru.input_size, hidden_size),
        "the projector's input": (
            embed_proj[0].in_features,
            hidden_size + prefix_gru.hidden_size,
        ),
        "the projector's output": (embed_proj[2].out_features, target_vocab_size),
    }
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise ValueError(f"the Domino head does not fit: {name} is {found}, not {wanted}.")
    if min(embedding.shape[0], head.shape[0]) < target_vocab_size:
        raise ValueError(
            f"the target's embedding or output head has fewer rows than its vocabulary of "
            f"{target_vocab_size}."
        )
    kinds = {weight.dtype for weight in (embedding, head, prefix_gru.weight_ih_l0)}
    if len(kinds) != 1 or not embedding.is_floating_point():
        raise ValueError(f"target and Domino head differ in dtype: {sorted(map(str, kinds))}.")


def refuse_inexact(original: Any, request: Any, *arguments: Any) -> str | None:
    """Why a request cannot be verified exactly, for a 400 answer; ``None`` if it can.

    A penalty depends on the tokens before each position, but a verify pass scores all positions of
    a block with the penalties of its start.
    """
    params = request.sampling_params
    asked = {
        "frequency_penalty": params.frequency_penalty != 0,
        "presence_penalty": params.presence_penalty != 0,
        "repetition_penalty": params.repetition_penalty != 1,
        "min_new_tokens": params.min_new_tokens > 0,
        "custom_logit_processor": request.custom_logit_processor is not None,
        "return_hidden_states": bool(request.return_hidden_states),
        "return_sampling_mask": bool(request.return_sampling_mask),
    }
    found = [name for name, present in asked.items() if present]
    if found:
        return (
            f"{', '.join(found)} cannot be combined exactly with a draft on a CPU server; leave "
            "it out of the request, or use a server without a draft."
        )
    return original(request, *arguments)


def record_stream(original: Any, tensor: Tensor, stream: Any) -> None:
    """Nothing for a CPU tensor."""
    if tensor.device.type != "cpu":
        original(tensor, stream)
