"""A target's config: through transformers where it knows the model type, else the JSON as it stands."""

from typing import Any

from domino_kit.target import check_model_folder, end_tokens_of

TEXT_PARTS = ("text_config", "language_config", "llm_config")
"""Where a config of several parts describes its language model."""

INHERITED = ("model_type", "tie_word_embeddings", "bos_token_id", "eos_token_id")
"""Fields that may stand beside the parts instead of in them."""


class JsonConfig:
    """The fields of a ``config.json`` whose model type transformers does not know, as attributes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(name)
        return self._fields[name]

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return dict(self._fields)

    def get_text_config(self) -> "JsonConfig":
        """The part that describes the language model, or the whole where there are no parts.

        Raises ``ValueError`` if several parts could be meant.
        """
        found = [name for name in TEXT_PARTS if isinstance(self._fields.get(name), dict)]
        if len(found) > 1:
            raise ValueError(
                f"the target's config has the parts {found}, and which one is the language model "
                "cannot be told; leave one of them in its config.json."
            )
        if not found:
            return self
        beside = {name: self._fields[name] for name in INHERITED if name in self._fields}
        return JsonConfig({**beside, **self._fields[found[0]]})


def read_target_config(name: str, trust_remote_code: bool, revision: str = "main") -> Any:
    """A target's config: transformers' object, or a :class:`JsonConfig` for an unknown model type.

    No model class is involved. Raises ``ValueError`` in one sentence if there is none, or a broken
    one.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    check_model_folder(name)
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        known = not isinstance(kind, str) or kind in CONFIG_MAPPING
        if known or (trust_remote_code and "AutoConfig" in (raw.get("auto_map") or {})):
            return AutoConfig.from_pretrained(
                name, revision=revision, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
        said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise ValueError(f"target {name!r} cannot be read: {said}") from None
    config = JsonConfig(raw)
    if not hasattr(config.get_text_config(), "hidden_size"):
        parts = [part for part, value in raw.items() if isinstance(value, dict)]
        custom = (
            " It brings custom code, which may be trusted to read it." if "auto_map" in raw else ""
        )
        raise ValueError(
            f"target {name!r} cannot be read: transformers does not know its model type {kind!r}, "
            f"and config.json has no hidden_size at the top or in {', '.join(TEXT_PARTS)} (its parts: "
            f"{', '.join(parts) or 'none'}).{custom}"
        )
    return config


def read_end_tokens(name: str, config: Any, tokenizer: Any) -> list[int]:
    """The end tokens that the loaded model would have, from files."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(name)
    except (OSError, ValueError):  # there is none: the config's own count, as transformers has it
        text = config.get_text_config().to_dict() if isinstance(config, JsonConfig) else config
        generation = GenerationConfig.from_model_config(text)
    return end_tokens_of(generation, tokenizer)
