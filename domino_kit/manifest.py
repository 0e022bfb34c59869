"""The manifest: the facts fixed when a draft is trained, in a file beside it."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from domino_kit.config import describe
from domino_kit.fingerprint import (
    json_hash,
    model_folder,
    target_fingerprints,
    tensor_fingerprint,
    tensor_hash,
)

MANIFEST_NAME = "domino_manifest.json"
TRACE_NAME = "domino_trace.safetensors"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "sglang")
VOLATILE = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "architectures"}
"""Config fields that say nothing about what a model computes."""


class TargetIdentity(BaseModel):
    """What identifies the target a draft was trained for. Hashes are SHA-256 in hex.

    ``config`` holds the fields of its text config; ``weights`` fingerprints of its files by group
    (:func:`~domino_kit.fingerprint.target_fingerprints`); ``embedding_rows`` and ``head_rows`` those
    of the loaded matrices. Empty or ``None`` where a manifest of an earlier version lacks them.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    config_hash: str
    embedding_hash: str
    head_hash: str
    tokenizer_hash: str
    chat_template_hash: str | None
    thinking: bool | None
    config: dict[str, Any] = {}
    weights: dict[str, str] = {}
    embedding_rows: str | None = None
    head_rows: str | None = None


class Manifest(BaseModel):
    """Where a draft comes from. Other tools ignore this file.

    ``draft`` is the whole :class:`~domino_kit.config.DraftConfig`; ``weights`` the fingerprint of
    each tensor of the draft, ``weight_hashes`` the hash of all its values and ``weight_sums`` its
    sums, which do not depend on an order;
    ``allowed`` the facts whose difference was accepted knowingly; ``gate`` whether training's own
    check passed, ``gate_lacks`` what that check could not compare.
    """

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
    draft: dict[str, Any] = {}
    weights: dict[str, str] = {}
    weight_hashes: dict[str, str] = {}
    weight_sums: dict[str, list[float]] = {}
    allowed: list[str] = []
    gate: str | None = None
    gate_lacks: str | None = None


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


def config_facts(text_config: Any) -> dict[str, Any]:
    """The fields of a target's text config that say what the model computes."""
    return {key: value for key, value in text_config.to_dict().items() if key not in VOLATILE}


def template_hash(tokenizer: Any) -> str | None:
    """Hash of the chat template, ``None`` without one."""
    template = tokenizer.chat_template
    return None if template is None else json_hash(template)


def matrix_hashes(target: Any) -> dict[str, str]:
    """Hashes of a target's ``embedding`` and output ``head``, all values."""
    return {
        "embedding": tensor_hash(target.embedding.weight),
        "head": tensor_hash(target.head.weight),
    }


def target_identity(
    name: str, target: Any, tokenizer: Any, thinking: bool | None
) -> TargetIdentity:
    """Identify a target by its :class:`~domino_kit.target.TargetEnds`, files and tokenizer."""
    config = config_facts(target.text_config)
    hashes = matrix_hashes(target)
    folder = model_folder(name)
    try:
        weights = {} if folder is None else target_fingerprints(folder)
    except ValueError:  # no safetensors files: the loaded matrices below are all there is
        weights = {}
    return TargetIdentity(
        name=name,
        config_hash=json_hash(config),
        embedding_hash=hashes["embedding"],
        head_hash=hashes["head"],
        tokenizer_hash=json_hash(tokenizer.get_vocab()),
        chat_template_hash=template_hash(tokenizer),
        thinking=thinking,
        config=config,
        weights=weights,
        embedding_rows=tensor_fingerprint(target.embedding.weight),
        head_rows=tensor_fingerprint(target.head.weight),
    )


def target_name(draft: str, given: str | None, manifest: Manifest | None) -> str:
    """The target as given, else as trained; ``ValueError`` if nothing names it."""
    if given is not None:
        return given
    if manifest is None:
        raise ValueError(f"draft {draft} has no manifest that names its target; give --target.")
    return manifest.target.name


def thinking_mode(given: bool | None, manifest: Manifest | None) -> bool | None:
    """The thinking mode as given, else as trained."""
    return manifest.target.thinking if given is None and manifest is not None else given


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
