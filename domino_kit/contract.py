"""The facts fixed when a draft is trained, written as its manifest and compared where it is used."""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from domino_kit.config import describe

MANIFEST_NAME = "domino_manifest.json"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "sglang")


class TargetIdentity(BaseModel):
    """What identifies the target a draft was trained for. Hashes are SHA-256 in hex."""

    model_config = ConfigDict(extra="forbid")

    name: str
    config_hash: str
    embedding_hash: str
    head_hash: str
    tokenizer_hash: str
    chat_template_hash: str | None
    thinking: bool | None


class Manifest(BaseModel):
    """Where a draft comes from. Other tools ignore this file."""

    model_config = ConfigDict(extra="forbid")

    toolkit_version: str
    libraries: dict[str, str]
    command: list[str]
    git_commit: str | None
    seed: int
    recipe: dict[str, Any]
    target: TargetIdentity
    mask_token_id: int
    mask_token_source: str
    target_layer_ids: list[int]
    last_layer_norm: str | None
    rope: dict[str, Any]
    shift_label: bool
    block_size: int
    num_proposals: int
    weights_dtype: str
    data: dict[str, Any]
    training: dict[str, Any]
    measured: dict[str, Any]


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a draft computes."""
    versions = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """The commit of the toolkit's own checkout, or ``None`` outside of one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or None


def tensor_hash(tensor: torch.Tensor) -> str:
    """Hash of a weight: its shape and its values, rounded to bfloat16.

    The rounding makes the hash of a float32 copy equal that of the bfloat16 original.
    """
    rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
    digest = hashlib.sha256(str(tuple(rounded.shape)).encode())
    digest.update(rounded.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def json_hash(value: Any) -> str:
    """Hash of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def target_identity(
    name: str, target: Any, tokenizer: Any, thinking: bool | None
) -> TargetIdentity:
    """Identify a loaded :class:`~domino_kit.target.Target` and its tokenizer."""
    config = target.text_config.to_dict()
    volatile = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures"}
    template = tokenizer.chat_template
    return TargetIdentity(
        name=name,
        config_hash=json_hash({k: v for k, v in config.items() if k not in volatile}),
        embedding_hash=tensor_hash(target.embedding.weight),
        head_hash=tensor_hash(target.head.weight),
        tokenizer_hash=json_hash(tokenizer.get_vocab()),
        chat_template_hash=None if template is None else json_hash(template),
        thinking=thinking,
    )


def compare_targets(trained: TargetIdentity, found: TargetIdentity) -> tuple[list[str], list[str]]:
    """Errors and warnings where a target differs from the one that a draft was trained for.

    Other weights or another tokenizer are errors: the draft reads that very embedding and head.
    Another chat template or thinking mode still works but changes acceptance.
    """
    errors, warnings = [], []
    for field, words in {
        "embedding_hash": "embedding",
        "head_hash": "output head",
        "tokenizer_hash": "tokenizer vocabulary",
    }.items():
        if getattr(trained, field) != getattr(found, field):
            errors.append(
                f"the {words} of target {found.name!r} is not the one this draft was trained with "
                f"({trained.name!r}); use that target, or train a draft for this one."
            )
    if trained.chat_template_hash != found.chat_template_hash:
        warnings.append("the chat template differs from the one in training; acceptance may drop.")
    if trained.thinking != found.thinking:
        warnings.append(
            f"thinking is {found.thinking} here and was {trained.thinking} in training; "
            "acceptance may drop."
        )
    return errors, warnings


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint, ``None`` for a draft of another tool; ``ValueError`` if broken."""
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValidationError) as error:
        said = describe(error) if isinstance(error, ValidationError) else str(error)
        raise ValueError(
            f"{path} is broken: {said} Delete it to use the draft without its training facts."
        ) from None
