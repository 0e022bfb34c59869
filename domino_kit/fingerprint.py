"""Fingerprints of weights: a few rows of every tensor, read from files without loading them."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DRAFT_ROWS = 32
"""Rows of each draft tensor: spread evenly, the first and the last among them."""
TARGET_ROWS = 4
"""Rows of each target tensor; every layer has several tensors, so any training changes some."""


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 of a weight: its shape and its values, rounded to bfloat16.

    The rounding makes the hash of a float32 copy equal that of the bfloat16 original.
    """
    digest = hashlib.sha256(str(tuple(tensor.shape)).encode())
    _update(digest, tensor.detach())
    return digest.hexdigest()


def json_hash(value: Any) -> str:
    """Hash of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def sampled_rows(count: int, wanted: int) -> list[int]:
    """At most ``wanted`` of ``count`` rows, evenly spread from the first to the last."""
    if count <= wanted:
        return list(range(count))
    return [round(place * (count - 1) / (wanted - 1)) for place in range(wanted)]


def rows_hash(shape: tuple[int, ...], rows: Iterator[Tensor]) -> str:
    """SHA-256 of a tensor's shape and some of its rows, rounded to bfloat16."""
    digest = hashlib.sha256(str(shape).encode())
    for row in rows:
        _update(digest, row)
    return digest.hexdigest()


def tensor_fingerprint(tensor: Tensor, wanted: int = DRAFT_ROWS) -> str:
    """:func:`rows_hash` of a loaded tensor over its :func:`sampled_rows`."""
    places = sampled_rows(tensor.shape[0], wanted)
    return rows_hash(tuple(tensor.shape), (tensor[place].detach() for place in places))


def weight_sums(tensor: Tensor) -> list[float]:
    """Sum of values and of squares, rounded to bfloat16 first: the same in any order."""
    values = tensor.detach().to("cpu", torch.bfloat16).double()
    return [float(values.sum()), float(values.square().sum())]


def same_sums(tensor: Tensor, sums: Sequence[float]) -> bool:
    """Whether a tensor holds the values that were summed, in whatever order."""
    found, scale = weight_sums(tensor), math.sqrt(max(sums[1] * tensor.numel(), 1e-30))
    return abs(found[0] - sums[0]) < 1e-6 * scale and math.isclose(
        found[1], sums[1], rel_tol=1e-6, abs_tol=1e-12
    )


def _update(digest: Any, values: Tensor) -> None:
    rounded = values.to("cpu", torch.bfloat16).contiguous()
    digest.update(rounded.view(torch.int16).numpy().tobytes())


# -- files ---------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model or draft; ``ValueError`` if there is none or one is missing."""
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt"))
        hint = f" ({', '.join(others)} is pickled and never read)" if others else ""
        raise ValueError(
            f"{folder} has no {WEIGHTS_NAME}{hint}; a draft needs safetensors weights."
        )
    files = [folder / name for name in sorted(set(read_weight_map(index).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{index} names {missing}, which are not in {folder}.")
    return files


def read_weight_map(index: Path) -> dict[str, str]:
    """Which file holds each tensor of a sharded model; ``ValueError`` if the index does not say so."""
    try:
        found = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if not all(isinstance(file, str) for file in found.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{index} is not a valid safetensors index.") from None
    return found


def tensor_slices(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and lazy slice (``get_shape()``, ``[i : j]``) of every stored tensor.

    Reads headers only, until a slice is indexed. Raises ``ValueError`` naming an unreadable file.
    """
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118  (not a dict)
                    yield name, reader.get_slice(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a readable safetensors file ({error}); copy or save it again."
            ) from None


def slice_fingerprint(stored: Any, wanted: int) -> str:
    """:func:`tensor_fingerprint` of a stored tensor, of which only those rows are read."""
    shape = tuple(stored.get_shape())
    places = sampled_rows(shape[0], wanted) if shape else []
    return rows_hash(shape, (stored[place : place + 1][0] for place in places))


# -- targets -------------------------------------------------------------------------------------

LAYER = re.compile(r"^(.*?\blayers\.\d+)\.")


def model_folder(name: str) -> Path | None:
    """Where a target's files lie on this machine, or ``None``; nothing is downloaded."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def target_fingerprints(folder: Path) -> dict[str, str]:
    """Fingerprints of a target's files by group: one for each layer, one for every other tensor.

    Raises ``ValueError`` if there are no readable safetensors files.
    """
    groups: dict[str, dict[str, str]] = {}
    for name, stored in tensor_slices(folder):
        if stored.get_shape():
            layer = LAYER.match(name)
            group = groups.setdefault(layer[1] if layer else name, {})
            group[name] = slice_fingerprint(stored, TARGET_ROWS)
    return {group: json_hash(found) for group, found in sorted(groups.items())}
