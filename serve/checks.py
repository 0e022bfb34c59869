"""What `domino serve` checks before SGLang is started: versions, draft, target, environment."""

import importlib.metadata
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domino_kit.config import ARCHITECTURE, DraftConfig
from domino_kit.serve.flags import Flags, whole_number
from domino_kit.serve.plugin import PLATFORM_NAME
from domino_kit.serve.versions import ANY_SGLANG, check_version

MODEL_TYPE = "qwen3"
"""The model type under which transformers reads a draft's config."""

# Families whose model in SGLang 0.5.23 has no set_dflash_layers_to_capture; the popular ones.
WITHOUT_FEATURES = (
    "qwen2", "qwen2_moe", "qwen2_5_vl", "gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe",
    "olmo2", "granite",
)  # fmt: skip
RECURRENT = ("rwkv", "recurrent_gemma")
"""Recurrent families whose config has no ``layer_types`` that would say so."""

CONTEXT_FIELDS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
"""Where SGLang looks for a target's context length, in its order."""


def check_sglang(environ: Mapping[str, str]) -> list[str]:
    """What to say about the installed SGLang; raises ``ValueError`` if it is none or untested."""
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "SGLang is not installed; install it with: pip install 'domino-kit[serve]'"
        ) from None
    complaint = check_version(installed, environ)
    if complaint is not None:
        raise ValueError(complaint)
    if check_version(installed, {}) is not None:
        return [f"SGLang {installed} was not tested; it is tried because {ANY_SGLANG} is set."]
    return []


def check_environment(environ: Mapping[str, str], device: str) -> None:
    """Refuse variables of SGLang that would keep the plugin or the platform out."""
    plugins = environ.get("SGLANG_PLUGINS", "")
    if plugins and "domino" not in [name.strip() for name in plugins.split(",")]:
        raise ValueError(
            f"SGLANG_PLUGINS is {plugins!r}, which keeps domino-kit's plugin out; unset it, or add "
            "domino to the list."
        )
    platform = environ.get("SGLANG_PLATFORM", "")
    if platform and (device != "cpu" or platform != PLATFORM_NAME):
        raise ValueError(
            f"SGLANG_PLATFORM is {platform!r}, which does not fit --device {device}; unset it, "
            "since domino serve sets what is needed."
        )
    if environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        raise ValueError(
            "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU route, whose kernels no published "
            "wheel has; unset it."
        )


# -- the draft -----------------------------------------------------------------------------------


def check_draft_files(folder: Path) -> None:
    """Raise ``ValueError`` unless SGLang itself can read the draft's config and tensor names.

    The weights are not loaded. ``folder`` has a config that ``read_config`` accepts.
    """
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = {"architectures": raw["architectures"][:1], "model_type": raw.get("model_type")}
    for field, wanted in {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}.items():
        if found[field] != wanted:
            raise ValueError(
                f"{folder / 'config.json'}: {field} is {found[field]!r}; SGLang reads a draft "
                f"with {json.dumps(wanted)} only, so write one that it reads: domino import {folder} "
                "--output FOLDER"
            )
    from domino_kit.checkpoint import ALIASES, canonical_name
    from domino_kit.fingerprint import tensor_slices

    for name, _ in tensor_slices(folder):
        plain = name.removeprefix("model.")
        if name not in ALIASES and canonical_name(name) != plain:
            raise ValueError(
                f"{folder}: SGLang would skip tensor {name!r} without a word, since it expects the "
                f"name {canonical_name(name)!r}; write a draft that it reads: domino import {folder} "
                "--output FOLDER"
            )


# -- the target ----------------------------------------------------------------------------------


def read_served_config(name: str, flags: Flags) -> Any:
    """The target's config as SGLang will read it; raises ``ValueError`` in one line."""
    from domino_kit.target_config import JsonConfig, read_target_config

    trust = "--trust-remote-code" in flags
    config = read_target_config(name, trust, flags.get("--revision") or "main")
    if isinstance(config, JsonConfig) and not trust and hasattr(config, "auto_map"):
        raise ValueError(
            f"target {name!r} cannot be read: its model type {config.model_type!r} needs custom "
            "code. Allow it with: -- --trust-remote-code"
        )
    return config


def check_target(name: str, target: Any, config: DraftConfig, flags: Flags, device: str) -> None:
    """Raise ``ValueError`` unless ``target``, a transformers config, fits the draft and device."""
    text = target.get_text_config()
    for kind in (target.model_type, text.model_type):
        check_target_family(name, kind)
    pairs = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_target_layers,
    }
    for field, wanted in pairs.items():
        found = getattr(text, field, None)
        if found != wanted:
            raise ValueError(
                f"target {name!r} has {field} {found}, but the draft was trained for {wanted}; "
                "give the draft's own target with --target."
            )
    _check_context(name, text, config, flags)
    if device == "cpu":
        check_cpu_target(name, target)


def check_target_family(name: str, kind: str) -> None:
    """Raise ``ValueError`` for a model type whose layers SGLang cannot capture."""
    if kind in WITHOUT_FEATURES:
        raise ValueError(
            f"target {name!r} is of the family {kind}, whose hidden states SGLang 0.5.23 "
            "cannot hand to a draft; serve a draft of another family, such as qwen3 or llama."
        )


def _check_context(name: str, text: Any, config: DraftConfig, flags: Flags) -> None:
    served = whole_number(flags, "--context-length", context_length(text))
    longest = config.max_position_embeddings
    if served > longest:
        raise ValueError(
            f"target {name!r} would be served with a context of {served} tokens, but the draft "
            f"ends at {longest} (max_position_embeddings); add: -- --context-length {longest}"
        )


def context_length(text: Any) -> int:
    """A target's context length, as SGLang derives it.

    Source: ``get_context_length`` in ``srt/utils/hf_transformers/common.py``.
    """
    scaling = getattr(text, "rope_scaling", None) or {}
    kept = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    factor = 1 if kept else scaling.get("factor", 1)
    found = [getattr(text, field, None) for field in CONTEXT_FIELDS]
    return next((int(factor * length) for length in found if length is not None), 2048)


def quantized(target: Any, flags: Flags) -> str | None:
    """How the target is quantised, in words, or ``None``."""
    given = flags.get("--quantization")
    if given is not None and given != "unquant":
        return f"--quantization {given}"
    for config in (target, target.get_text_config()):
        found = getattr(config, "quantization_config", None)
        if found:
            method = found.get("quant_method") if isinstance(found, dict) else None
            return f"quantization_config {method or 'in its config'}"
    return None


def check_cpu_target(name: str, target: Any) -> None:
    """Raise ``ValueError`` for a target that the CPU platform cannot run."""
    text = target.get_text_config()
    said = quantized(target, {})
    if said is not None:
        raise ValueError(
            f"target {name!r} is quantised ({said}), which is not implemented on a CPU; give its "
            "unquantised original with --target."
        )
    kinds = set(
        getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    )
    if text.model_type in RECURRENT or kinds - {"full_attention", "sliding_attention"}:
        shown = f"layers of type {sorted(kinds)}" if kinds else f"model type {text.model_type}"
        raise ValueError(
            f"target {name!r} has {shown}; recurrent and hybrid targets are not implemented on a "
            "CPU, where only full attention is."
        )
    if "sliding_attention" in kinds:
        raise ValueError(
            f"target {name!r} has sliding-window attention, which is not implemented on a CPU; "
            "serve it on a GPU."
        )
    if getattr(text, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"target {name!r} has multi-head latent attention, which is not implemented on a CPU; "
            "serve it on a GPU."
        )


# -- the port ------------------------------------------------------------------------------------


def check_port_free(host: str, port: int) -> None:
    """Raise ``ValueError`` if a server could not listen there now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: a port that another one left a moment ago is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"{host}:{port} cannot be listened on ({error.strerror}); stop what uses it, or give "
            "another --port or --host."
        ) from None
