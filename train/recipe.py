"""The training recipe: every option with its type, default and help, from YAML and key=value."""

import difflib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from domino_kit.config import describe
from domino_kit.train.recipe_files import apply_override, load_values, number

Dtype = Literal["auto", "float32", "bfloat16"]


class Section(BaseModel):
    """Common rules: no unknown keys, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_flags_for_numbers(cls, values: Any) -> Any:
        """Pydantic would read ``true`` as 1."""
        for key, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(key)
            if isinstance(value, bool) and field and "bool" not in str(field.annotation):
                raise ValueError(
                    f"{key} is {str(value).lower()}, but it is not a yes-or-no option."
                )
        return values


class TargetSection(Section):
    """The frozen model that the draft will serve."""

    name: str = Field(description="hub name or folder of the target model")
    dtype: Dtype = Field("auto", description="compute type; auto: float32 on CPU, bfloat16 on GPU")
    device: str = Field("auto", description="auto takes cuda where there is one")
    thinking: bool | None = Field(None, description="enable_thinking passed to the chat template")
    trust_remote_code: bool = Field(False, description="run model code from the hub")
    expected: dict[str, Any] = Field(
        {}, description="fields of the target's config that the recipe is for; others are noted"
    )
    load: Literal["whole", "ends"] = Field(
        "whole", description="ends: only embedding and output head, features from elsewhere"
    )
    embedding_name: str | None = Field(
        None, description="tensor of the embedding, for target.load=ends; default: found by its end"
    )
    head_name: str | None = Field(None, description="tensor of the output head, likewise")

    @model_validator(mode="after")
    def _refuse_idle_names(self) -> "TargetSection":
        for name in ("embedding_name", "head_name"):
            if getattr(self, name) is not None and self.load != "ends":
                raise ValueError(f"target.{name} does nothing without target.load=ends.")
        return self


class DraftSection(Section):
    """The shape of the draft. Sizes and other values left out are the target's own."""

    projector: Literal["domino", "none"] = Field("domino", description="none trains plain DFlash")
    num_layers: int = Field(5, gt=0, description="draft layers")
    num_features: int | None = Field(
        None, gt=0, description="target layers to read, evenly spread; default: num_layers"
    )
    target_layer_ids: list[int] | None = Field(
        None, description="target layers to read, by name (id i: output of layer i)"
    )
    allow_last_layer: bool = Field(
        False, description="let target_layer_ids name the last layer (taken before the final norm)"
    )
    block_size: int = Field(16, gt=1, description="rows of a block, the anchor included")
    mask_token_id: int | None = Field(None, ge=0, description="default: tokenizer or known family")
    shift_label: bool | None = Field(
        None, description="row k predicts token k+1; default: true for domino, false for none"
    )
    gru_hidden_dim: int = Field(1024, gt=0, description="GRU width of the head")
    emb_dim: int = Field(256, gt=0, description="rank of the head's projection")
    intermediate_size: int | None = Field(None, gt=0, description="MLP width")
    num_attention_heads: int | None = Field(None, gt=0, description="query heads")
    num_key_value_heads: int | None = Field(None, gt=0, description="key/value heads")
    head_dim: int | None = Field(None, gt=0, description="width of a head")
    rope_theta: float | None = Field(None, gt=0, description="RoPE base")
    rms_norm_eps: float | None = Field(None, gt=0, description="epsilon of the norms")
    max_position_embeddings: int | None = Field(None, gt=0, description="longest context")
    init: Literal["random", "target"] = Field(
        "random", description="random as published, or start from the target's own last layers"
    )
    init_from: Path | None = Field(
        None, description="start from another draft's weights (also DFlash, for a Domino draft)"
    )


class DataSection(Section):
    """Conversations to learn from, best with the target's own answers."""

    train: str = Field(description="JSONL or parquet file, or a hub data set's name")
    validation: str | None = Field(None, description="same, held out; default: none")
    split: str = Field("train", description="split, for a hub data set")
    subset: str | None = Field(None, description="subset (configuration) of a hub data set")
    max_length: int = Field(3072, gt=1, description="tokens a row; longer rows are cut")
    max_rows: int | None = Field(None, gt=0, description="use only the first rows")
    min_supervised: int = Field(2, gt=0, description="drop rows with fewer supervised tokens")
    provenance: str = Field("unknown", description="where the answers come from, for the manifest")


class TrainSection(Section):
    """Optimisation."""

    steps: int | None = Field(None, gt=0, description="optimizer steps; or give epochs")
    epochs: float | None = Field(None, gt=0, description="passes over the data; or give steps")
    batch_size: int = Field(2, gt=0, description="rows a micro-batch of one process")
    accumulation: int = Field(
        1, gt=0, description="batch_size times this many rows a step, shared by all processes"
    )
    num_anchors: int = Field(256, gt=0, description="blocks a row")
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="final by peak learning rate")
    warmup_ratio: float = Field(0.04, ge=0, le=1, description="share of steps with rising rate")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW betas")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    clip: float = Field(1.0, gt=0, description="gradient norm limit")
    loss_decay_gamma: float | None = Field(
        None, gt=0, description="decay of row weights; default: 7, 5 or 4 for block 16, 10 or 8"
    )
    position_weights: Literal["decay", "dpace"] = Field(
        "decay", description="row weights: by offset, or D-PACE from the draft's own confidence"
    )
    dpace_alpha: float = Field(0.5, gt=0, le=1, description="smoothing of D-PACE's confidence")
    dpace_divide_by: Literal["weights", "blocks"] = Field(
        "weights", description="what D-PACE's weighted losses are divided by"
    )
    distill: Literal["none", "forward_kl", "total_variation"] = Field(
        "none", description="divergence from the target's own distribution"
    )
    distill_mix: float = Field(
        1.0, ge=0, le=1, description="its share; the rest is cross-entropy with the text"
    )
    distill_temperature: float = Field(1.0, gt=0, description="divides both models' logits")
    distill_top_k: int = Field(0, ge=0, description="tokens of the target that count; 0: all")
    visible_prefix: float = Field(
        0.0, ge=0, le=1, description="share of blocks that show some true tokens after the anchor"
    )
    visible_prefix_base: float = Field(
        0.9, gt=0, le=1, description="how fast longer visible prefixes get rarer"
    )
    lambda_base_start: float = Field(1.0, ge=0, le=1, description="first weight of the base loss")
    lambda_base_decay_ratio: float = Field(
        1.0, gt=0, le=1, description="share of steps until that weight is zero"
    )
    regress_steps: int = Field(
        0, ge=0, description="first optimizer steps that fit hidden rows, without vocabulary"
    )
    regress_lr: float | None = Field(None, gt=0, description="their learning rate; default: lr")
    chunk_mb: int = Field(512, gt=0, description="memory for one chunk of logits")
    feature_cache_mb: int = Field(
        4096, ge=0, description="memory for target features kept between epochs; 0: none"
    )
    seed: int = Field(42, ge=0, description="of initial weights, data order and anchors")
    threads: int | None = Field(None, gt=0, description="CPU threads; default: PyTorch's choice")

    @model_validator(mode="after")
    def _refuse_idle_options(self) -> "TrainSection":
        """An option that changes nothing is a mistake: its switch is missing."""
        for prefix, needed, on in (
            ("dpace_", "train.position_weights=dpace", self.position_weights == "dpace"),
            ("distill_", "train.distill", self.distill != "none"),
            ("visible_prefix_", "train.visible_prefix", self.visible_prefix > 0),
        ):
            for name, field in type(self).model_fields.items():
                if name.startswith(prefix) and not on and getattr(self, name) != field.default:
                    raise ValueError(f"train.{name} does nothing without {needed}.")
        if self.distill != "none" and self.distill_mix == 0:
            raise ValueError("train.distill_mix=0 leaves nothing of train.distill; set it to none.")
        return self


class FeaturesSection(Section):
    """Where the target's hidden states come from."""

    backend: Literal["hf", "sglang", "cached"] = Field(
        "hf", description="the target in process, an SGLang server, or files prepared before"
    )
    folder: Path | None = Field(
        None, description="of `domino prepare-features`, for features.backend=cached"
    )
    url: str | None = Field(
        None, description="a running feature server; default: one is started for the run"
    )

    @field_validator("folder")
    @classmethod
    def _expand(cls, folder: Path | None) -> Path | None:
        return None if folder is None else folder.expanduser()

    @model_validator(mode="after")
    def _check(self) -> "FeaturesSection":
        if (self.backend == "cached") != (self.folder is not None):
            raise ValueError(
                "features.folder goes with features.backend=cached: set both, or neither."
            )
        if self.url is not None and self.backend != "sglang":
            raise ValueError(
                f"features.url needs features.backend=sglang, which is {self.backend}; set it, or "
                "leave the url out."
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"features.url is {self.url!r}; give an address such as http://127.0.0.1:30000."
            )
        return self


class OutputSection(Section):
    """What a run writes."""

    folder: Path = Field(description="folder of the run; must not exist yet, unless --resume")
    save_every: int | None = Field(None, gt=0, description="steps between checkpoints")
    max_checkpoints: int | None = Field(
        None, gt=0, description="keep only the newest; default: all"
    )
    validate_every: int | None = Field(None, gt=0, description="steps between validations")
    validation_rows: int = Field(16, gt=0, description="rows of a validation")
    log_every: int = Field(10, gt=0, description="steps between lines of metrics")
    save_dtype: Dtype = Field("auto", description="type of saved weights; auto: the target's")
    tracker: Literal["none", "wandb", "trackio"] = Field(
        "none", description="where metrics go beside metrics.jsonl and TensorBoard"
    )
    tracker_project: str = Field("domino-kit", description="the project there")

    @field_validator("folder")
    @classmethod
    def _expand(cls, folder: Path) -> Path:
        return folder.expanduser()


class Recipe(Section):
    """One training run."""

    target: TargetSection
    draft: DraftSection = DraftSection()  # type: ignore[call-arg]
    data: DataSection
    train: TrainSection = TrainSection()  # type: ignore[call-arg]
    features: FeaturesSection = FeaturesSection()  # type: ignore[call-arg]
    output: OutputSection

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if (self.train.steps is None) == (self.train.epochs is None):
            raise ValueError("set exactly one of train.steps and train.epochs.")
        draft = self.draft
        if draft.num_features is not None and draft.target_layer_ids is not None:
            raise ValueError("set draft.num_features or draft.target_layer_ids, not both.")
        if draft.projector == "none" and draft.shift_label:
            raise ValueError(
                "draft.shift_label=true needs draft.projector=domino: engines read a plain DFlash "
                "draft unshifted."
            )
        if self.train.visible_prefix > 0 and draft.block_size < 3:
            raise ValueError(
                f"train.visible_prefix needs draft.block_size of at least 3 (now {draft.block_size}): "
                "a token to show and one to predict after the anchor."
            )
        if self.target.load == "ends" and self.features.backend == "hf":
            raise ValueError(
                "target.load=ends needs features.backend=sglang or cached (now hf): in process, "
                "features are computed by the whole target."
            )
        if self.target.load == "ends" and draft.init == "target":
            raise ValueError(
                "draft.init=target copies layers of the whole target, which target.load=ends does not "
                "load; set draft.init=random, or draft.init_from to another draft."
            )
        if self.data.train == self.data.validation:
            raise ValueError("data.validation is the training data; use held-out rows.")
        if self.train.steps is not None and self.train.regress_steps >= self.train.steps:
            raise ValueError(
                f"train.regress_steps {self.train.regress_steps} leaves none of train.steps "
                f"{self.train.steps} for the real objective."
            )
        return self

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step, over all processes."""
        return self.train.batch_size * self.train.accumulation

    @property
    def needs_hidden(self) -> bool:
        """Whether training reads the target's last hidden rows, not only its features."""
        return self.train.regress_steps > 0 or self.train.distill != "none"

    @property
    def shift_label(self) -> bool:
        """The label mode after defaults."""
        if self.draft.shift_label is None:
            return self.draft.projector == "domino"
        return self.draft.shift_label

    @property
    def gamma(self) -> float:
        """The row decay after defaults: the DFlash paper's values, interpolated between them."""
        if self.train.loss_decay_gamma is not None:
            return self.train.loss_decay_gamma
        block = self.draft.block_size
        return {16: 7.0, 10: 5.0, 8: 4.0}.get(block, max(1.0, 7.0 * block / 16))


def read_recipe(source: Path | str | None, overrides: list[str]) -> Recipe:
    """A recipe from a YAML file or a bundled name (or nothing) and ``section.key=value`` overrides.

    Raises ``ValueError`` naming the recipe or override, the key, and the nearest known key.
    """
    values = {} if source is None else load_values(source)
    for override in overrides:
        apply_override(values, override)
    place = "" if source is None else f"recipe {source}: "
    _refuse_unknown_keys(values, place)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{place}{describe(error)}{_missing_hint(error)}") from None


def _sections() -> dict[str, type[Section]]:
    return {
        name: field.annotation
        for name, field in Recipe.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def _refuse_unknown_keys(values: dict[str, Any], place: str) -> None:
    sections = _sections()
    known = {f"{name}.{key}" for name, kind in sections.items() for key in kind.model_fields}
    for name, section in values.items():
        if name not in sections:
            near = difflib.get_close_matches(str(name), sections, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sections)}."
            raise ValueError(f"{place}unknown section {name!r}; {hint}")
        if not isinstance(section, dict):
            raise ValueError(f"{place}section {name!r} is {section!r}, not a mapping.")
        for key in section:
            full = f"{name}.{key}"
            if full in known:
                section[key] = number(section[key])
                continue
            near = difflib.get_close_matches(full, sorted(known), n=1)
            near = near or [k for k in sorted(known) if k.endswith(f".{key}")]
            hint = f"did you mean {near[0]}?" if near else f"see {name} in domino train --help."
            raise ValueError(f"{place}unknown key {full}; {hint}")


def _missing_hint(error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] != "missing":
        return ""
    name = ".".join(str(part) for part in first["loc"])
    example = {"target": "target.name=Qwen/Qwen3-8B", "data": "data.train=answers.jsonl"}
    return f" Set it in the recipe or as {example.get(name, name + '=…')}."


def describe_options() -> str:
    """Every option with its default and help, one a line, for ``domino train --help``."""
    lines = []
    for name, kind in _sections().items():
        lines.append(f"{name}: {(kind.__doc__ or '').strip()}")
        for key, field in kind.model_fields.items():
            default = "required" if field.is_required() else f"default {_shown(field.default)}"
            choices = [str(arg) for arg in get_args(field.annotation) if isinstance(arg, str)]
            allowed = f" ({' | '.join(choices)})" if choices else ""
            lines.append(f"  {name}.{key}  {field.description}{allowed} [{default}]")
        lines.append("")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
