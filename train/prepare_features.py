"""`domino prepare-features`: the target's features of a recipe's rows, written to files once."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from domino_kit import __version__
from domino_kit.checkpoint import write_whole
from domino_kit.train.cached_features import (
    CACHE_INDEX,
    FeatureFacts,
    FeatureIndex,
    StoredRow,
    checksum,
    facts_of,
    read_index,
    read_stored,
    tokens_hash,
)
from domino_kit.train.dataset import Sample
from domino_kit.train.feature_source import row_encoder
from domino_kit.train.features import RowEncoder
from domino_kit.train.recipe import Recipe, read_recipe
from domino_kit.train.setup import build_run

ROW_BYTES = 1024
"""What a row costs beside its values, in a shard's header and in the index."""


@dataclass(frozen=True)
class Shard:
    """The rows of one file, each with the hash of its tokens."""

    name: str
    rows: list[tuple[str, Sample]]

    def size(self, facts: FeatureFacts) -> int:
        """Its bytes, as expected before it is written."""
        width = facts.row_width * torch.finfo(getattr(torch, facts.dtype)).bits // 8
        return sum(len(sample.input_ids) * width + ROW_BYTES for _, sample in self.rows)


def run_prepare_features(
    recipe_source: Path | str | None,
    overrides: list[str],
    output: Path,
    *,
    engine: str | None = None,
    hidden: bool | None = None,
    shard_mb: int = 512,
    quiet: bool = False,
) -> int:
    """Write the features of all training and validation rows below ``output``; exit status 0.

    ``engine`` (default: the recipe's, or hf) computes them; ``hidden`` (default: if the recipe has
    regression steps) keeps last hidden rows too. Shards that are whole are kept; those that an
    earlier run with more rows left behind are removed. Raises ``ValueError`` if the folder holds
    other features or the disk is too small.
    """
    recipe = _with_engine(read_recipe(recipe_source, overrides), engine)
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)  # as in training: other sums round differently
    if hidden is None:
        hidden = recipe.needs_hidden
    elif recipe.needs_hidden and not hidden:
        raise ValueError(
            "--no-hidden does not go with train.regress_steps, which reads those rows."
        )
    run = build_run(recipe)
    facts, source = facts_of(run, hidden=hidden), recipe.features.backend
    shards = plan_shards([*run.samples, *run.validation], facts, shard_mb)
    if (output / CACHE_INDEX).exists():
        _check_same(output / CACHE_INDEX, read_index(output), facts, source)
    console = Console(stderr=True, quiet=quiet, markup=False, highlight=False)
    done = {shard.name: whole_shard(output / shard.name, shard, facts, source) for shard in shards}
    left = [shard for shard in shards if done[shard.name] is None]
    surplus = surplus_files(output, shards, facts, source)
    _check_space(output, shards, left, surplus, facts, console)
    if left or surplus:
        (output / CACHE_INDEX).unlink(missing_ok=True)  # nobody may read what is being written
    for file in surplus:
        console.print(f"removed {file}, which an earlier run left")
        file.unlink()
    if left:
        with row_encoder(run, needs_hidden=hidden) as encode:
            for place, shard in enumerate(left):
                done[shard.name] = write_shard(output, shard, facts, source, encode)
                console.print(f"shard {place + 1} of {len(left)}: {output / shard.name}")
    rows = [row for each in done.values() for row in each or []]
    sizes = {shard.name: (output / shard.name).stat().st_size for shard in shards}
    index = FeatureIndex(
        toolkit_version=__version__, source=source, facts=facts, shards=sizes, rows=rows
    )
    write_whole(output / CACHE_INDEX, index.model_dump_json(indent=1) + "\n")
    console.print(f"features: {output} ({len(rows)} rows in {len(shards)} shards)")
    console.print(f"train with: features.backend=cached features.folder={output}")
    return 0


def _with_engine(recipe: Recipe, engine: str | None) -> Recipe:
    """The recipe with the backend that computes features: hf runs the target, so loads it whole."""
    wanted = engine or recipe.features.backend
    update = {"backend": "hf" if wanted == "cached" else wanted, "folder": None}
    target = recipe.target
    if update["backend"] == "hf":
        update["url"] = None
        target = target.model_copy(
            update={"load": "whole", "embedding_name": None, "head_name": None}
        )
    features = recipe.features.model_copy(update=update)
    return recipe.model_copy(update={"features": features, "target": target})


def plan_shards(samples: Sequence[Sample], facts: FeatureFacts, shard_mb: int) -> list[Shard]:
    """Rows in the data's order, equal ones once, in files of about ``shard_mb`` MB."""
    shards = [Shard("features-00000.safetensors", [])]
    rows: dict[str, Sample] = {}
    for sample in samples:
        rows.setdefault(tokens_hash(sample), sample)
    size = 0
    for tokens, sample in rows.items():
        own = Shard("", [(tokens, sample)]).size(facts)
        if size + own > shard_mb * 2**20 and shards[-1].rows:
            shards.append(Shard(f"features-{len(shards):05d}.safetensors", []))
            size = 0
        shards[-1].rows.append((tokens, sample))
        size += own
    return shards


def _check_same(path: Path, index: FeatureIndex, facts: FeatureFacts, source: str) -> None:
    """Raise ``ValueError`` if a folder holds other features than those to write."""
    index.facts.check(facts, path)
    if index.facts.hidden != facts.hidden or index.source != source:
        kept = "with" if index.facts.hidden else "without"
        raise ValueError(
            f"{path} is of features from {index.source} {kept} last hidden rows; choose another "
            "--output, or remove it."
        )


def whole_shard(
    file: Path, shard: Shard, facts: FeatureFacts, source: str
) -> list[StoredRow] | None:
    """The rows of a shard that was written whole, ``None`` if it must be written (again).

    Raises ``ValueError`` if it holds features of something else.
    """
    found = _stored_header(file)
    if found is None:
        return None
    _check_same(file, found, facts, source)
    if [row.tokens for row in found.rows] != [tokens for tokens, _ in shard.rows]:
        return None
    for row in found.rows:
        try:
            features, kept = read_stored(file, row.tokens, hidden=facts.hidden)
        except ValueError:
            return None
        if checksum([features] if kept is None else [features, kept]) != row.checksum:
            return None
    return found.rows


def surplus_files(
    output: Path, shards: list[Shard], facts: FeatureFacts, source: str
) -> list[Path]:
    """Shards of an earlier run that had more of them, whole or torn, and what it was writing.

    Raises ``ValueError`` if one holds features of something else, which is not ours to remove.
    """
    planned = {shard.name for shard in shards}
    found = [file for file in output.glob("features-*.safetensors") if file.name not in planned]
    for file in found:
        stored = _stored_header(file)
        if stored is not None:
            _check_same(file, stored, facts, source)
    return sorted([*found, *output.glob(".features-*.safetensors.new")])


def _stored_header(file: Path) -> FeatureIndex | None:
    """What a shard says that it holds, ``None`` if there is none or it is torn."""
    try:
        with safe_open(file, framework="pt") as reader:
            said = json.loads((reader.metadata() or {})["domino_kit"])
        return FeatureIndex(
            toolkit_version="", source=said["source"], facts=said["facts"], shards={},
            rows=said["rows"],
        )  # fmt: skip
    except (SafetensorError, OSError, ValueError, KeyError):
        return None


def _check_space(
    output: Path,
    shards: list[Shard],
    left: list[Shard],
    surplus: list[Path],
    facts: FeatureFacts,
    console: Console,
) -> None:
    """Say what will be written, and raise ``ValueError`` if the disk has no room for it."""
    size = sum(shard.size(facts) for shard in left)
    existing = output.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free + sum(file.stat().st_size for file in surplus)
    rows = sum(len(shard.rows) for shard in shards)
    kept = (
        f" ({len(shards) - len(left)} of {len(shards)} shards are there)" if left != shards else ""
    )
    console.print(
        f"{rows} rows, {facts.row_width} columns of {facts.dtype}: {_mb(size)} to write{kept}, "
        f"{_mb(free)} free at {existing}"
    )
    if size > free:
        raise ValueError(
            f"the features need {_mb(size)}, but {existing} has {_mb(free)} free; choose a larger "
            "disk with --output, or fewer rows (data.max_rows), tokens (data.max_length) or layers."
        )


def _mb(size: int) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / 2**20:.1f} MB"


def write_shard(
    output: Path, shard: Shard, facts: FeatureFacts, source: str, encode: RowEncoder
) -> list[StoredRow]:
    """Compute a shard's rows and write them whole or not at all.

    Raises ``OSError`` if the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    rows = []
    for tokens, sample in shard.rows:
        features, hidden = encode(sample)
        parts = {f"{tokens}.features": features.cpu().contiguous()}
        if facts.hidden:
            parts[f"{tokens}.hidden"] = hidden.cpu().contiguous()
        tensors |= parts
        rows.append(
            StoredRow(
                id=sample.row_id, tokens=tokens, length=len(sample.input_ids), shard=shard.name,
                checksum=checksum(list(parts.values())),
            )
        )  # fmt: skip
    said = {
        "source": source,
        "facts": facts.model_dump(mode="json"),
        "rows": [row.model_dump() for row in rows],
    }
    output.mkdir(parents=True, exist_ok=True)
    fresh = output / f".{shard.name}.new"
    try:
        save_file(tensors, fresh, metadata={"domino_kit": json.dumps(said)})
    except SafetensorError as error:
        fresh.unlink(missing_ok=True)
        raise OSError(f"the shard {fresh} could not be written: {error}") from None
    fresh.replace(output / shard.name)
    return rows
