"""The frozen target model: its embedding, its output head and the features a draft reads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from domino_kit.kv_cache import SlotCache
from domino_kit.products import product

# Config fields that scale or cap embeddings or logits, and the value at which they do nothing. A
# draft reads raw embeddings and raw head products, so such a target would be learnt wrongly.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
    "output_multiplier_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "embedding_multiplier_scale": (None, 1, 1.0),
    "scale_emb": (None, 1, 1.0),
    "scale_embedding": (None, False),
}


class TargetEnds(Protocol):
    """What a draft reads of its target, which is its two ends, and facts.

    A whole :class:`Target` is one; :class:`~domino_kit.target_ends.StoredEnds` holds nothing else.
    """

    @property
    def embedding(self) -> Any:
        """The input embedding, with a ``weight [V, D]``."""

    @property
    def head(self) -> Any:
        """The output head, with a ``weight [V, D]`` and no bias."""

    @property
    def text_config(self) -> Any:
        """The config of the language model, fields as attributes."""

    @property
    def layer_ids(self) -> list[int]:
        """The layers whose outputs are the features."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def device(self) -> torch.device:
        """Where the embedding lives."""

    @property
    def num_bytes(self) -> int:
        """Memory of all weights in process."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embeddings ``[..., D]``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits ``[..., V]`` of normed hidden rows."""


@dataclass(frozen=True)
class TargetPass:
    """One pass: normed last hidden rows ``[B, Q, D]`` and features ``[B, Q, layers*D]``."""

    hidden: Tensor
    features: Tensor


def default_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """``count`` layers spread evenly from 1 to T-3; the middle one if ``count`` is 1.

    Source: ``build_target_layer_ids`` of SpecForge and SGLang, which repeats ids on shallow
    targets; here that raises ``ValueError``.
    """
    ids: list[int] = []
    if count == 1:
        ids = [num_target_layers // 2]
    else:
        step = (num_target_layers - 4) / (count - 1)
        ids = [round(1 + index * step) for index in range(count)]
    if sorted(set(ids)) != ids or not 0 <= min(ids) <= max(ids) < num_target_layers:
        raise ValueError(
            f"cannot spread {count} feature layers over a target of {num_target_layers} layers "
            f"(the usual formula gives {ids}); name them with draft.target_layer_ids."
        )
    return ids


def check_scaling(text_config: Any) -> None:
    """Raise ``ValueError`` if a target's config scales embeddings or logits."""
    for name, neutral in NEUTRAL_FIELDS.items():
        value = getattr(text_config, name, None)
        if value not in neutral:
            raise ValueError(
                f"the target's config has {name}={value}; targets that scale embeddings or "
                "logits are not supported."
            )


def check_layer_ids(layer_ids: Sequence[int], count: int, allow_last_layer: bool) -> list[int]:
    """The layers to read of a target of ``count`` layers; ``ValueError`` if they cannot be."""
    if len(set(layer_ids)) != len(layer_ids) or not layer_ids:
        raise ValueError(f"target_layer_ids {layer_ids} must be distinct and not empty.")
    outside = [i for i in layer_ids if not 0 <= i < count]
    if outside:
        raise ValueError(
            f"target_layer_ids {outside} are out of range: the target has {count} layers, "
            f"0 to {count - 1}."
        )
    if count - 1 in layer_ids and not allow_last_layer:
        raise ValueError(
            f"target_layer_ids {layer_ids} includes the last layer {count - 1}, whose feature "
            "tools define differently (before or after the final norm). Choose an earlier one, "
            "or set draft.allow_last_layer=true to take it before the norm, as SGLang does."
        )
    return list(layer_ids)


class Target:
    """A Hugging Face causal language model in evaluation mode, without gradients.

    Feature ``i`` is the output of decoder layer ``i``, before the model's final norm also for the
    last layer. ``layer_ids`` sets which ones :meth:`encode` and :meth:`step` return.
    """

    def __init__(self, model: Any, layer_ids: list[int], allow_last_layer: bool = False) -> None:
        """Raises ``ValueError`` if the model cannot be a target or has no such layers."""
        self.model: Any = model.eval().requires_grad_(False)
        if self.model.config._attn_implementation != "sdpa":
            self.model.set_attn_implementation("sdpa")
        self.text_config = self.model.config.get_text_config()
        self.decoder = self.model.get_decoder()
        self.embedding = self.model.get_input_embeddings()
        self.head = self.model.get_output_embeddings()
        layers = getattr(self.decoder, "layers", None)
        if layers is None or self.embedding is None or self.head is None:
            raise ValueError(
                f"{type(model).__name__} does not expose decoder layers, an input embedding and an "
                "output head; a target must be a decoder-only causal language model."
            )
        self.layers: list[nn.Module] = list(layers)
        check_scaling(self.text_config)
        self._check_ends()
        self.layer_ids = check_layer_ids(layer_ids, len(self.layers), allow_last_layer)

    def _check_ends(self) -> None:
        if getattr(self.embedding, "embed_scale", None) is not None and (
            self.text_config.model_type == "gemma"
        ):
            raise ValueError("the target's embedding scales its rows, which is not supported.")
        if getattr(self.head, "bias", None) is not None:
            raise ValueError("the target's output head has a bias, which no draft format carries.")

    # -- facts ---------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Rows of the output head (and of the embedding)."""
        return int(self.head.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.text_config.hidden_size)

    @property
    def device(self) -> torch.device:
        """Where the embedding lives."""
        return self.embedding.weight.device

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        return sum(each.numel() * each.element_size() for each in self.model.parameters())

    # -- the two ends of the model ---------------------------------------------------------------

    def embed(self, token_ids: Tensor) -> Tensor:
        """Raw embeddings ``[..., D]``."""
        return self.embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits ``[..., V]`` of normed hidden rows."""
        return product(hidden, self.head.weight)

    # -- passes --------------------------------------------------------------------------------

    @contextmanager
    def _captured(self) -> Iterator[dict[int, Tensor]]:
        found: dict[int, Tensor] = {}

        def keep(index: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                found[index] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.layers[i].register_forward_hook(keep(i)) for i in self.layer_ids]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, **inputs: Any) -> TargetPass:
        with torch.no_grad(), self._captured() as found:
            hidden = self.decoder(**inputs).last_hidden_state
        return TargetPass(hidden, torch.cat([found[i] for i in self.layer_ids], dim=-1))

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> TargetPass:
        """One pass over right-padded whole texts ``[B, S]``; padding rows hold garbage."""
        return self._run(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)

    def new_cache(self, capacity: int) -> SlotCache:
        """A cache for :meth:`step`.

        Raises ``ValueError`` for targets whose state cannot take back a rejected token.
        """
        kinds = set(getattr(self.text_config, "layer_types", None) or ["full_attention"])
        if not getattr(self.text_config, "layer_types", None) and getattr(
            self.text_config, "sliding_window", None
        ):
            kinds = {"sliding_attention"}  # Mistral, Phi-3, Qwen3-MoE: one window for every layer
        if kinds != {"full_attention"}:
            raise ValueError(
                f"the target has layers of type {sorted(kinds - {'full_attention'})}; decoding "
                "needs full attention everywhere, since rejected drafts must be taken back. "
                "Use replay for this target."
            )
        return SlotCache(len(self.layers), capacity)

    def step(self, input_ids: Tensor, positions: Tensor, cache: SlotCache) -> TargetPass:
        """Run tokens ``[B, Q]`` at ``positions [B, Q]``, reading and writing ``cache``."""
        return self._run(
            input_ids=input_ids,
            position_ids=positions,
            attention_mask=cache.begin(positions),
            past_key_values=cache,
            use_cache=True,
        )


def choose_device(wanted: str) -> str:
    """``auto`` is cuda where there is one; raises ``ValueError`` for a device that is not there."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(wanted).type
    except RuntimeError:
        raise ValueError(f"device {wanted!r} is unknown; use auto, cpu or cuda.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {wanted!r} was asked for, but PyTorch sees no CUDA device here.")
    return wanted


def choose_dtype(wanted: str, device: str) -> torch.dtype:
    """``auto`` is float32 on a CPU and bfloat16 elsewhere."""
    if wanted == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def check_model_folder(path: str) -> None:
    """Raise ``ValueError`` if a *local* path is meant but is not a model folder."""
    folder = Path(path)
    looks_local = path.startswith((".", "/", "~")) or folder.exists() or path.count("/") > 1
    if looks_local and not (folder.expanduser() / "config.json").is_file():
        raise ValueError(
            f"target {path!r} is not a model folder (no config.json there). Give a Hugging Face "
            "folder or a hub name such as Qwen/Qwen3-8B."
        )


def load_target_model(path: str, dtype: torch.dtype, device: str, trust_remote_code: bool) -> Any:
    """Load the target's weights through transformers, with SDPA attention.

    Raises ``ValueError`` in one sentence if there is no such model.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    check_model_folder(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(f"target {path!r} cannot be loaded: {first_line}") from None
    return model.to(device)


def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """Load the target's tokenizer; raises ``ValueError`` in one sentence if there is none."""
    from transformers import AutoTokenizer

    check_model_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the tokenizer of target {path!r} cannot be loaded: {first_line}"
        ) from None


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer: of a loaded model's generation config, else the tokenizer's."""
    return end_tokens_of(getattr(model, "generation_config", None), tokenizer)


def end_tokens_of(generation: Any, tokenizer: Any) -> list[int]:
    """:func:`end_token_ids` from a generation config, which may be ``None``."""
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = tokenizer.eos_token_id
    return sorted({ids} if isinstance(ids, int) else set(ids or []))
