"""The target of `domino prepare`, known from its files; its weights are loaded only when asked."""

from dataclasses import dataclass
from typing import Any

from domino_kit.fingerprint import json_hash, model_folder, target_fingerprints
from domino_kit.manifest import config_facts, template_hash
from domino_kit.target import choose_device, choose_dtype, load_target_model, load_tokenizer
from domino_kit.target_config import read_end_tokens, read_target_config


@dataclass(frozen=True)
class PreparedTarget:
    """A target's tokenizer and facts.

    ``fingerprint`` changes with its config, weights, tokenizer or template, but not with its place;
    ``context`` is the most tokens it was made for.
    """

    name: str
    tokenizer: Any
    end_tokens: list[int]
    context: int
    device: str
    dtype: str
    fingerprint: str
    config_hash: str
    template_hash: str | None
    trust_remote_code: bool

    def load(self) -> Any:
        """The model itself; raises ``ValueError`` if it cannot be loaded."""
        dtype = choose_dtype(self.dtype, self.device)
        return load_target_model(self.name, dtype, self.device, self.trust_remote_code)


def read_target(
    name: str, device: str, dtype: str, engine: str, trust_remote_code: bool
) -> PreparedTarget:
    """Read a target's files; raises ``ValueError`` in one sentence for what is missing.

    Where another machine answers (``engine`` "server"), device and dtype are not looked at.
    """
    from domino_kit.serve.checks import context_length

    device = "cpu" if engine == "server" else choose_device(device)
    kind = str(choose_dtype(dtype, device)).removeprefix("torch.")
    config = read_target_config(name, trust_remote_code)
    tokenizer = load_tokenizer(name, trust_remote_code)
    if not tokenizer.chat_template:
        raise ValueError(
            f"target {name!r} has no chat template in its tokenizer, so no prompt can be written "
            "for it; use a chat model."
        )
    config_hash = json_hash(config_facts(config.get_text_config()))
    facts = [config_hash, json_hash(tokenizer.get_vocab()), template_hash(tokenizer)]
    return PreparedTarget(
        name=name,
        tokenizer=tokenizer,
        end_tokens=read_end_tokens(name, config, tokenizer),
        context=context_length(config.get_text_config()),
        device=device,
        dtype=kind,
        fingerprint=json_hash([*facts, _weights(name)])[:12],
        config_hash=config_hash,
        template_hash=facts[2],
        trust_remote_code=trust_remote_code,
    )


def _weights(name: str) -> dict[str, str]:
    """Fingerprints of the weights' files, none where they are not here or of another kind."""
    folder = model_folder(name)
    try:
        return {} if folder is None else target_fingerprints(folder)
    except ValueError:
        return {}
