"""Features out of files: what `domino prepare-features` wrote, looked up by a row's token ids."""

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from domino_kit.config import describe
from domino_kit.fingerprint import json_hash
from domino_kit.train.dataset import Sample
from domino_kit.train.setup import Run

CACHE_INDEX = "index.json"
AGAIN = "run the same domino prepare-features again, which keeps what is whole"


class FeatureFacts(BaseModel):
    """What stored features are of: a target (SHA-256 of its parts), layers and type.

    ``weights_hash`` covers all of the target's files, ``None`` where they were not on the machine;
    ``hidden`` says whether last hidden rows are there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    config_hash: str
    embedding_hash: str
    head_hash: str
    weights_hash: str | None
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    hidden: bool

    @property
    def row_width(self) -> int:
        """Columns a token: its layers' features, and the last hidden row if it is kept."""
        return (len(self.layer_ids) + self.hidden) * self.hidden_size

    def check(self, wanted: "FeatureFacts", file: Path) -> None:
        """Raise ``ValueError`` unless these facts, found in ``file``, serve what is ``wanted``."""
        for name, said in {
            "config_hash": "another target config",
            "embedding_hash": "a target with another embedding",
            "head_hash": "a target with another output head",
            "weights_hash": "a target with other weights",
            "layer_ids": "other target layers",
            "hidden_size": "another hidden size",
            "dtype": "another type",
        }.items():
            found, here = getattr(self, name), getattr(wanted, name)
            if found != here and not (name == "weights_hash" and None in (found, here)):
                raise ValueError(
                    f"{file} is of {said}: {name} {_short(found)} (target {self.target!r}), but "
                    f"this run needs {_short(here)} (target {wanted.target!r}); prepare features "
                    "with this recipe into another folder, or use the recipe they were made with."
                )
        if wanted.hidden and not self.hidden:
            raise ValueError(
                f"{file} holds no last hidden rows, which train.regress_steps needs; prepare them "
                "with --hidden into another folder, or set train.regress_steps=0."
            )


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 32 else str(value)


class StoredRow(BaseModel):
    """One row: its id in the data, its tokens' hash, its length, and where it lies."""

    model_config = ConfigDict(extra="forbid")

    id: str
    tokens: str
    length: int
    shard: str
    checksum: int


class FeatureIndex(BaseModel):
    """``index.json`` of a folder of features; ``shards`` maps a file to its size in bytes."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    toolkit_version: str
    source: str
    facts: FeatureFacts
    shards: dict[str, int]
    rows: list[StoredRow]


def facts_of(run: Run, *, hidden: bool) -> FeatureFacts:
    """The facts of the features that a run reads."""
    identity = run.identity
    return FeatureFacts(
        target=identity.name,
        config_hash=identity.config_hash,
        embedding_hash=identity.embedding_hash,
        head_hash=identity.head_hash,
        weights_hash=json_hash(identity.weights) if identity.weights else None,
        layer_ids=tuple(run.target.layer_ids),
        hidden_size=run.target.hidden_size,
        dtype=str(run.target.embedding.weight.dtype).removeprefix("torch."),
        hidden=hidden,
    )


def tokens_hash(sample: Sample) -> str:
    """SHA-256 of a row's token ids: what its features depend on."""
    ids = torch.tensor(sample.input_ids, dtype=torch.int64)
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def checksum(tensors: Sequence[Tensor]) -> int:
    """CRC-32 of the values of some tensors, in order."""
    value = 0
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().view(torch.uint8)
        value = zlib.crc32(plain.numpy().tobytes(), value)
    return value


def read_index(folder: Path) -> FeatureIndex:
    """The index of a finished folder; ``ValueError`` if there is none or it is broken."""
    path = folder / CACHE_INDEX
    if not path.is_file():
        state = "is not finished" if folder.is_dir() else "does not exist"
        raise ValueError(
            f"features.folder {folder} {state} (no {CACHE_INDEX}); make it with: domino "
            f"prepare-features RECIPE --output {folder}"
        )
    try:
        return FeatureIndex.model_validate_json(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValidationError) as error:
        said = describe(error) if isinstance(error, ValidationError) else str(error)
        raise ValueError(f"{path} is broken: {said} Delete it, and {AGAIN}.") from None


def read_stored(file: Path, tokens: str, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
    """A row's features ``[S, layers*D]`` and hidden rows ``[S, D]`` out of a shard.

    Raises ``ValueError`` naming the file if it cannot be read or lacks the row.
    """
    try:
        with safe_open(file, framework="pt") as reader:
            features = reader.get_tensor(f"{tokens}.features")
            return features, reader.get_tensor(f"{tokens}.hidden") if hidden else None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is torn or unreadable ({error}); {AGAIN}.") from None


class CachedFeatures:
    """A row encoder that reads a folder of features; every row is checked as it is read."""

    def __init__(self, folder: Path, wanted: FeatureFacts, device: torch.device) -> None:
        """Raises ``ValueError`` if the folder is unfinished, torn, or of something else."""
        self._folder, self._device, self._wanted = folder, device, wanted
        self._index = read_index(folder)
        self._index.facts.check(wanted, folder / CACHE_INDEX)
        self._rows = {row.tokens: row for row in self._index.rows}
        for name, size in self._index.shards.items():
            file = folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                said = "is missing" if found is None else f"has {found} bytes and is torn"
                raise ValueError(f"{file} {said}; {CACHE_INDEX} says {size} bytes: {AGAIN}.")

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise ``ValueError`` naming the first of the samples that is not stored."""
        missing = [sample for sample in samples if tokens_hash(sample) not in self._rows]
        if missing:
            raise ValueError(self._lacks(missing[0], len(missing)))

    def _lacks(self, sample: Sample, count: int) -> str:
        others = f" and {count - 1} more" if count > 1 else ""
        return (
            f"{self._folder / CACHE_INDEX} has {len(self._rows)} rows, but not row "
            f"{sample.row_id!r} ({len(sample.input_ids)} tokens){others}; prepare features with "
            "the data, template and data.max_length of this run into another folder."
        )

    def __call__(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Features ``[S, layers*D]`` and last hidden rows ``[S, D]``, or ``[S, 0]`` if not wanted.

        Raises ``ValueError`` for a row that is missing or not what was written.
        """
        tokens = tokens_hash(sample)
        row = self._rows.get(tokens)
        if row is None:
            raise ValueError(self._lacks(sample, 1))
        file = self._folder / row.shard
        features, hidden = read_stored(file, tokens, hidden=self._index.facts.hidden)
        parts = [features] if hidden is None else [features, hidden]
        if checksum(parts) != row.checksum or len(features) != len(sample.input_ids):
            raise ValueError(f"{file} is torn: row {row.id!r} is not what was written; {AGAIN}.")
        if hidden is None or not self._wanted.hidden:
            hidden = features.new_empty(len(features), 0)
        return features.to(self._device), hidden.to(self._device)
