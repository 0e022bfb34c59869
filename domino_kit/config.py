"""A draft's config.json: the one place that reads and writes it and knows its variants."""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)

ARCHITECTURE = "DFlashDraftModel"
READ_ARCHITECTURES = (
    ARCHITECTURE,
    "DominoDraftModel",
    "Qwen3DFlashDraftModel",
)
HEAD_FIELDS = ("shift_label", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim")
NESTED_FIELDS = ("mask_token_id", "target_layer_ids", "projector_type", *HEAD_FIELDS)

# Written by other tools, without meaning for the draft model itself.
IGNORED_KEYS = {
    "architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version",
    "attention_dropout", "use_cache", "initializer_range", "draft_vocab_size", "pad_token_id",
    "num_anchors", "loss_decay_gamma", "lambda_base_start", "lambda_base_decay_ratio",
    "lambda_base_decay_steps", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers", "is_causal", "tie_word_embeddings", "rope_scaling", "rope_parameters",
    "rope_theta", "attention_bias", "dflash_config", "mask_token", "name_or_path", "_name_or_path",
}  # fmt: skip

PositiveInt = Field(gt=0, strict=True)
PositiveFloat = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


class DraftConfig(BaseModel):
    """Everything that defines a draft's shape and alignment.

    ``target_layer_ids`` i means the output of the target's decoder layer i. ``block_size`` counts
    the anchor; an engine serves ``num_proposals = block_size - 1`` drafts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = PositiveInt
    intermediate_size: int = PositiveInt
    num_hidden_layers: int = PositiveInt
    num_attention_heads: int = PositiveInt
    num_key_value_heads: int = PositiveInt
    head_dim: int = PositiveInt
    vocab_size: int = PositiveInt
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    max_position_embeddings: int = PositiveInt
    block_size: int = Field(gt=1, strict=True)
    num_target_layers: int = PositiveInt
    target_layer_ids: tuple[StrictInt, ...] = Field(min_length=1)
    mask_token_id: int = Field(ge=0, strict=True)
    projector_type: Literal["domino", "none"]
    shift_label: StrictBool
    pure_draft_prefix_len: int = Field(default=1, ge=0, strict=True)
    gru_hidden_dim: int | None = Field(default=None, gt=0, strict=True)
    emb_dim: int | None = Field(default=None, gt=0, strict=True)
    bos_token_id: StrictInt | None = None
    eos_token_id: StrictInt | list[StrictInt] | None = None

    @property
    def has_head(self) -> bool:
        """Whether the draft carries the Domino head."""
        return self.projector_type == "domino"

    @property
    def num_proposals(self) -> int:
        """Drafts that an engine verifies after each anchor."""
        return self.block_size - 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = self.target_layer_ids
        if len(set(ids)) != len(ids):
            raise ValueError(f"target_layer_ids {list(ids)} has duplicates; name each layer once.")
        outside = [i for i in ids if not 0 <= i < self.num_target_layers]
        if outside:
            raise ValueError(
                f"target_layer_ids {outside} are out of range: the target has "
                f"{self.num_target_layers} layers, 0 to {self.num_target_layers - 1}."
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding, "
                f"which has {self.vocab_size} rows; choose a spare row below that."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need an even one.")
        self._check_head()
        return self

    def _check_head(self) -> None:
        if not self.has_head:
            if self.shift_label:
                raise ValueError(
                    "shift_label true needs projector_type 'domino': SGLang reads a plain DFlash "
                    "draft unshifted (row k predicts token k), so it would be served misaligned."
                )
            if self.gru_hidden_dim is not None or self.emb_dim is not None:
                raise ValueError(
                    "gru_hidden_dim and emb_dim describe a Domino head, but projector_type is not "
                    "'domino': the head would be ignored. Set projector_type to 'domino'."
                )
            return
        missing = [name for name in ("gru_hidden_dim", "emb_dim") if getattr(self, name) is None]
        if missing:
            raise ValueError(f"projector_type 'domino' needs {' and '.join(missing)}.")
        if self.pure_draft_prefix_len != 1:
            raise ValueError(
                f"pure_draft_prefix_len is {self.pure_draft_prefix_len}; only 1 can be served "
                "(SGLang 0.5.23 refuses every other value)."
            )

    def to_json(self, dtype: str) -> dict[str, Any]:
        """The canonical ``config.json`` (docs/checkpoint.md), with ``dtype`` of the weights."""
        nested: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.has_head:
            nested["projector_type"] = "domino"
            nested.update({name: getattr(self, name) for name in HEAD_FIELDS})
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "dtype": dtype,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_hidden_layers,
            "is_causal": False,
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "dflash_config": nested,
        }


def resolve_folder(folder: str | Path) -> Path:
    """The folder of a draft; raises ``ValueError`` if it is none."""
    found = Path(folder).expanduser()
    if not found.is_dir():
        raise ValueError(
            f"draft {str(folder)!r} is not a folder; give a draft checkpoint's folder."
        )
    return found


def read_config(path: Path) -> DraftConfig:
    """Read a draft's ``config.json`` in any known variant.

    Raises ``ValueError`` naming the file, the field, what was found and what is allowed.
    """
    raw = read_object(path)
    try:
        return parse_config(raw)
    except ValidationError as error:
        raise ValueError(f"{path}: {describe(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a ``config.json``; raises ``ValueError`` naming a file that has none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; a draft checkpoint needs a config.json."
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, not a JSON object.")
    return raw


def check_architecture(raw: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless a config names a draft's architecture."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or architectures[:1] not in [
        [name] for name in READ_ARCHITECTURES
    ]:
        raise ValueError(
            f"architectures is {architectures!r}; a draft has one of {list(READ_ARCHITECTURES)}."
        )


def parse_config(raw: dict[str, Any]) -> DraftConfig:
    """Read the fields of a ``config.json``; :func:`read_config` adds the file's name to errors."""
    if "speculators_model_type" in raw:
        raise ValueError(
            "speculators_model_type marks the layout of speculators, which is not read as it is; "
            "convert the folder first with domino import."
        )
    check_architecture(raw)
    nested = raw.get("dflash_config", {})
    if not isinstance(nested, dict):
        raise ValueError(f"dflash_config is {nested!r}, not an object.")
    _refuse_unsupported(raw)
    values: dict[str, Any] = {}
    for name in DraftConfig.model_fields:
        value = _one_value(raw, nested, name)
        if value is not None:
            values[name] = value
    values["rope_theta"] = _rope_theta(raw)
    if "mask_token_id" not in values:
        raise ValueError(
            "mask_token_id is missing; without it an engine falls back to another token and "
            "acceptance collapses. Add dflash_config.mask_token_id as used in training."
        )
    _read_projector(values)
    known = {*DraftConfig.model_fields, *IGNORED_KEYS, "hidden_act"}
    _refuse_unknown(raw, nested, known)
    return DraftConfig(**values)


def _one_value(raw: dict[str, Any], nested: dict[str, Any], name: str) -> Any:
    """A field from the nested or top level; both levels must agree where both are given."""
    top, inner = raw.get(name), nested.get(name)
    if None not in (top, inner) and (type(top), top) != (type(inner), inner):
        raise ValueError(f"{name} is {inner!r} in dflash_config but {top!r} at the top level.")
    return inner if inner is not None else top


def _read_projector(values: dict[str, Any]) -> None:
    projector = values.setdefault("projector_type", "none")
    if projector not in ("domino", "none"):
        raise ValueError(
            f"projector_type is {projector!r}; known are 'domino' and none at all. An engine would "
            "serve any other name as plain DFlash and ignore the head."
        )
    if projector == "none":
        values.setdefault("shift_label", False)
        return
    if "shift_label" not in values:
        raise ValueError("shift_label is missing; a Domino draft must say true or false.")
    if not isinstance(values["shift_label"], bool):
        raise ValueError(f"shift_label is {values['shift_label']!r}; it must be true or false.")
    if "pure_draft_prefix_len" not in values:
        raise ValueError("pure_draft_prefix_len is missing; a Domino draft must say 1.")


def _rope_theta(raw: dict[str, Any]) -> float:
    """θ from ``rope_theta`` and ``rope_parameters``, which must agree; plain RoPE only."""
    found: dict[str, Any] = {}
    if raw.get("rope_theta") is not None:
        found["rope_theta"] = raw["rope_theta"]
    for key in ("rope_parameters", "rope_scaling"):
        block = raw.get(key)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise ValueError(f"{key} is {block!r}, not an object.")
        kind = block.get("rope_type", block.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{key} has rope_type {kind!r}; this version reads 'default' only.")
        strange = set(block) - {"rope_type", "type", "rope_theta"}
        if strange:
            raise ValueError(
                f"{key} has {sorted(strange)}; a draft rotates the whole head with plain RoPE, "
                "so these target-only fields must not be there."
            )
        if block.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = block["rope_theta"]
    if not found:
        raise ValueError("rope_theta is missing; it must be the value used in training.")
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}; it must be a number.")
    if len(set(found.values())) > 1:
        raise ValueError(f"the RoPE base differs within the file: {found}.")
    return next(iter(found.values()))


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    """Fields whose other values would change what the model computes."""
    required: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "is_causal": (False,),
    }
    for name, allowed in required.items():
        if raw.get(name) is not None and raw[name] not in allowed:
            raise ValueError(f"{name} is {raw[name]!r}; only {allowed[0]!r} is supported.")
    layer_types = raw.get("layer_types")
    count = raw.get("num_hidden_layers")
    if layer_types is not None and (not isinstance(layer_types, list) or len(layer_types) != count):
        raise ValueError(f"layer_types is {layer_types!r}; it must list {count} layers.")
    if any(kind != "full_attention" for kind in layer_types or []):
        raise ValueError(
            f"layer_types is {layer_types}; only full_attention is supported (tools disagree on "
            "sliding windows inside a block)."
        )
    draft_vocab = raw.get("draft_vocab_size")
    if draft_vocab is not None and draft_vocab != raw.get("vocab_size"):
        raise ValueError(
            f"draft_vocab_size {draft_vocab} differs from vocab_size {raw.get('vocab_size')}; a "
            "draft must use the target's whole vocabulary."
        )


def _refuse_unknown(raw: dict[str, Any], nested: dict[str, Any], known: set[str]) -> None:
    allowed_nested = {*NESTED_FIELDS, "block_size", "num_target_layers", "mask_token"}
    for place, keys, allowed in (("", raw, known), ("dflash_config.", nested, allowed_nested)):
        unknown = sorted(set(keys) - allowed)
        if unknown:
            near = difflib.get_close_matches(unknown[0], sorted(allowed), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"unknown field {place}{unknown[0]!r}{hint}")


def describe(error: ValidationError) -> str:
    """A pydantic error as one plain sentence: field, what was found, what is allowed."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        return message
    if first["type"] == "value_error":
        return f"{name}: {message}"
    if first["type"] == "missing":
        return f"{name} is missing."
    if first["type"] == "extra_forbidden":
        return f"unknown field {name!r}."
    return f"{name} is {first['input']!r}: {message[0].lower() + message[1:]}."
