"""The probe inside SGLang's scheduler: what each stage of a traced request really computed.

It only watches: every value is copied where SGLang hands it from one function to the next. Without
``DOMINO_KIT_PROBE`` none of this is registered.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from domino_kit.serve.plugin import TRACE_PARAM
from domino_kit.serve.traces import check_trace_name, write_record
from domino_kit.trace import Record

NEEDED = ("block_embeds", "hidden", "proposals", "accepted_run")
"""Without one of these a step was not seen: CUDA graphs replay kernels and call no function."""

logger = logging.getLogger(__name__)


@dataclass
class Traced:
    """A request that is being traced, and what was appended to the draft's cache since its last
    record: positions ``[P]``, features ``[P, layers*D]`` and context ``[P, D]`` of each append."""

    folder: Path
    steps: int = 0
    cached_prefix: int | None = None
    appended: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def append(self, positions: Tensor, features: Tensor, context: Tensor) -> None:
        """Take over rows that SGLang is appending to the draft's cache."""
        if self.cached_prefix is None:
            self.cached_prefix = int(positions[0])
        self.appended.append((_copy(positions), _copy(features), _copy(context)))

    def take_appended(self) -> Record:
        """All rows since the last record, as part of the next one."""
        names, parts = ("positions", "features", "context"), zip(*self.appended, strict=True)
        rows = {name: torch.cat(part) for name, part in zip(names, parts, strict=False)}
        self.appended = []
        return {**rows, "cached_prefix": torch.tensor(self.cached_prefix)}


@dataclass
class Row:
    """A traced request's place in the running batch, and the record of its running step."""

    place: int
    traced: Traced
    record: Record = field(default_factory=dict)


class Probe:
    """Writes the stages of every decode step of traced requests to ``folder/NAME``.

    One method for each function of SGLang that is watched. ``own_rollout`` says that the rollout is
    :func:`~domino_kit.serve.cpu_rollout.cpu_rollout`, which shows what it computes; SGLang's own
    does not, so its logits and states are computed again from the modules it was called with.
    Untested on a GPU, where the server needs ``--disable-cuda-graph``.
    """

    def __init__(self, folder: Path, *, own_rollout: bool) -> None:
        self.folder = folder
        self._own_rollout = own_rollout
        self._traced: WeakKeyDictionary[Any, Traced] = WeakKeyDictionary()
        self._rows: list[Row] = []
        self._spans: list[slice] = []  # rows of each request in the append that is running
        self._positions = torch.empty(0)
        self._stopped: str | None = None

    # -- requests ------------------------------------------------------------------------------

    def accept(self, complaint: str | None, request: Any, *_: Any) -> str | None:
        """After ``validate_dflash_request``: begin a trace, or say why not (status 400)."""
        name = (request.sampling_params.custom_params or {}).get(TRACE_PARAM)
        if complaint is not None or name is None:
            return None
        if self._stopped is not None:
            return f"this server has stopped tracing: {self._stopped}"
        try:
            folder = self.folder / check_trace_name(name)
            folder.mkdir(parents=True)
        except FileExistsError:
            return f"{self.folder} already has a trace {name!r}; give each request its own name."
        except (ValueError, OSError) as error:
            return f"the request cannot be traced: {error}"
        self._traced[request] = Traced(folder)
        return None

    # -- a step --------------------------------------------------------------------------------

    def step(self, original: Any, worker: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        """Around ``forward_batch_generation``: one prefill, or one block of each request."""
        found = ((place, self._traced.get(request)) for place, request in enumerate(batch.reqs))
        self._rows = [Row(place, traced) for place, traced in found if traced is not None]
        if not self._rows:
            return original(worker, batch, *rest, **more)
        try:
            if int(worker.server_args.tp_size) > 1:
                self._stop("it needs a server without tensor parallelism")
            self._note(anchor=batch.seq_lens.long())
            result = original(worker, batch, *rest, **more)
            self._write()
        finally:
            self._rows = []
        return result

    def _note(self, **stages: Tensor) -> None:
        """Add one row of each tensor ``[B, …]`` to the record of each traced request."""
        for row in self._rows:
            row.record |= {name: _copy(values[row.place]) for name, values in stages.items()}

    def _write(self) -> None:
        for row in self._rows:
            if "proposals" not in row.record:  # a prefill, or a step without the draft
                continue
            missing = [stage for stage in NEEDED if stage not in row.record]
            if missing:
                self._stop(f"{missing[0]} was not seen; start with --disable-cuda-graph")
                return
            try:
                write_record(row.traced.folder, row.traced.steps, row.record)
            except (OSError, SafetensorError) as error:
                self._stop(f"{row.traced.folder} cannot be written ({error})")
                return
            row.traced.steps += 1

    def _stop(self, why: str) -> None:
        """Trace nothing any more; requests are answered as before."""
        logger.error("domino-kit probe stops tracing: %s.", why)
        self._stopped = why
        self._traced.clear()
        self._rows = []

    # -- the draft's context -------------------------------------------------------------------

    def append(
        self,
        worker: Any,
        *,
        positions: Tensor,
        commit_lens: Tensor | None = None,
        extend_lens: Tensor | None = None,
        **_: Any,
    ) -> None:
        """Before ``_append_target_hidden_to_draft_kv_by_loc``: which rows are whose.

        A prefill packs the rows of each request; a verify pass has K for each, of which the first
        ``commit_lens`` stay.
        """
        if self._rows:
            self._positions = positions
            self._spans = split_rows(len(positions), commit_lens, extend_lens)

    def project(self, context: Tensor, model: Any, features: Tensor) -> None:
        """After ``project_target_hidden``: features ``[N, layers*D]``, context ``[N, D]``."""
        for row in self._rows:
            span = self._spans[row.place]
            if span.stop > span.start:
                row.traced.append(self._positions[span], features[span], context[span])

    # -- the block -----------------------------------------------------------------------------

    def block(self, kwargs: dict[str, Any], runner: Any, forward_batch: Any, *_: Any) -> None:
        """After ``_extend_forward_kwargs``: what the draft's forward gets, and its context."""
        if not self._rows or not runner.is_draft_worker:
            return
        requests = len(forward_batch.seq_lens)
        self._note(
            block_ids=forward_batch.input_ids.view(requests, -1),
            block_positions=forward_batch.positions.view(requests, -1),
            block_embeds=kwargs["input_embeds"].view(
                requests, -1, kwargs["input_embeds"].shape[-1]
            ),
        )
        for row in self._rows:
            length = int(forward_batch.seq_lens[row.place])
            own = int(forward_batch.req_pool_indices[row.place])
            slots = runner.req_to_token_pool.req_to_token[own, :length].long()
            row.record |= read_context(runner, slots) | row.traced.take_appended()

    def hidden(self, output: Any, *_: Any, **__: Any) -> None:
        """After ``DFlashDraftModel.forward``; for a Domino draft the rollout says it again."""
        if self._rows:
            embeds = self._rows[0].record["block_embeds"]
            self._note(hidden=output.hidden_states.view(-1, *embeds.shape))

    # -- proposals -----------------------------------------------------------------------------

    def rollout(self, original: Callable[..., Tensor], **arguments: Any) -> Tensor:
        """Around ``domino_greedy_rollout``."""
        if not self._rows:
            return original(**arguments)
        recording: Record = {}
        if self._own_rollout:
            proposals = original(**arguments, recording=recording)
        else:
            proposals = original(**arguments)
            recording = follow_rollout(proposals, **arguments)
        self._note(hidden=arguments["draft_hidden"], **recording)
        return proposals

    def verify(self, original: Callable[..., Any], worker: Any, **arguments: Any) -> Any:
        """Around ``_accept_block``: proposals, the target's choices, and how many stand."""
        if not self._rows:
            return original(worker, **arguments)
        candidates, chosen = arguments["candidates"], arguments.get("target_predict")
        if chosen is None:
            chosen = arguments["next_token_logits"].argmax(-1)
        self._note(proposals=candidates[:, 1:], target_argmax=chosen.view(candidates.shape))
        result = original(worker, **arguments)
        self._note(accepted_run=result[0].long()[:, None])
        if not worker._is_domino:
            self._note_plain_logits(worker)
        return result

    def _note_plain_logits(self, worker: Any) -> None:
        """Plain DFlash takes the best token in chunks; the logits are computed here again."""
        model = worker.model_runner
        weight = model.model.lm_head.weight[: int(model.model_config.vocab_size)]
        for row in self._rows:
            hidden = row.record["hidden"][1:].to(weight)
            row.record["base_logits"] = _copy(F.linear(hidden, weight))


def _copy(values: Tensor) -> Tensor:
    """On the CPU, and never a view: SGLang uses its buffers again."""
    return values.detach().to("cpu", copy=True)


def split_rows(rows: int, commit_lens: Tensor | None, extend_lens: Tensor | None) -> list[slice]:
    """Rows of each request in one append of ``rows`` rows (see :meth:`Probe.append`)."""
    if commit_lens is not None:
        block = rows // len(commit_lens)
        return [
            slice(place * block, place * block + kept)
            for place, kept in enumerate(commit_lens.tolist())
        ]
    lengths = [rows] if extend_lens is None else extend_lens.tolist()
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def read_context(runner: Any, slots: Tensor) -> Record:
    """Keys and values ``[a, layers, kv_heads, head_dim]`` at a request's slots of the draft's cache."""
    pool = runner.token_to_kv_pool
    layers = [layer.self_attn.attn.layer_id for layer in runner.model.layers]
    return {
        "context_keys": _copy(torch.stack([pool.get_key_buffer(i)[slots] for i in layers], 1)),
        "context_values": _copy(torch.stack([pool.get_value_buffer(i)[slots] for i in layers], 1)),
    }


@torch.no_grad()
def follow_rollout(
    proposals: Tensor,
    *,
    draft_hidden: Tensor,
    bonus_tokens: Tensor,
    target_embedding: Any,
    lm_head_weight: Tensor,
    prefix_gru: Any,
    embed_proj: Any,
    vocab_size: int,
    shift_label: bool,
    **_: Any,
) -> Record:
    """What a rollout must have computed to find ``proposals [B, n]``, from its own modules.

    ``base_logits``, ``gru_states`` and ``corrected_logits`` as ``[B, n, …]``. The first token is
    never corrected.
    """
    start = 0 if shift_label else 1
    rows = draft_hidden[:, start : start + proposals.shape[1]]
    base = F.linear(rows, lm_head_weight[:vocab_size])
    states, _ = prefix_gru(
        target_embedding(torch.cat([bonus_tokens[:, None], proposals[:, :-1]], 1))
    )
    corrections = embed_proj(torch.cat([rows, states], dim=-1))
    corrections[:, 0] = 0
    return {"base_logits": base, "gru_states": states, "corrected_logits": base + corrections}


def register_probe(folder: Path, *, on_cpu: bool) -> None:
    """Register every method of a :class:`Probe` with SGLang's hook registry.

    To be called after the plugin's own hooks on the same functions, which it must see applied.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    probe = Probe(folder, own_rollout=on_cpu)
    speculative = "sglang.srt.speculative"
    # A subclass's own methods would hide hooks on upstream's.
    worker = (
        "domino_kit.serve.cpu_worker.CpuDFlashWorker"
        if on_cpu
        else f"{speculative}.dflash_worker_v2.DFlashWorkerV2"
    )
    draft = "sglang.srt.models.dflash.DFlashDraftModel"
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    around, before, after = HookType.AROUND, HookType.BEFORE, HookType.AFTER
    for target, hook, kind in (
        (f"{speculative}.dflash_utils.validate_dflash_request", probe.accept, after),
        (f"{worker}.forward_batch_generation", probe.step, around),
        (f"{worker}._append_target_hidden_to_draft_kv_by_loc", probe.append, before),
        (f"{draft}.project_target_hidden", probe.project, after),
        (f"{runner}._extend_forward_kwargs", probe.block, after),
        (f"{draft}.forward", probe.hidden, after),
        (f"{speculative}.domino_utils.domino_greedy_rollout", probe.rollout, around),
        (f"{worker}._accept_block", probe.verify, around),
    ):
        HookRegistry.register(target, hook, kind)
