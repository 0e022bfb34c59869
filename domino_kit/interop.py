"""`domino export` and `domino import`: draft checkpoints between this toolkit and others."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from domino_kit.checkpoint import (
    atomic_folder,
    check_shapes,
    expected_shapes,
    is_rotary,
    write_whole,
)
from domino_kit.config import DraftConfig, describe, parse_config, read_object, resolve_folder
from domino_kit.draft_contract import check_draft
from domino_kit.fingerprint import WEIGHTS_NAME, tensor_slices
from domino_kit.layouts import (
    ONE_UP,
    Flat,
    detect_layout,
    flatten,
    not_carried,
    our_path,
    our_tensor,
    parse_layout,
    their_path,
    their_tensor,
    write_layout,
)
from domino_kit.manifest import MANIFEST_NAME, TRACE_NAME, read_manifest

Kind = Literal["kept", "renamed", "changed", "added", "dropped"]
LAYER_IDS = "aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Change:
    """What became of one config field, tensor or file: its old and new name, and values if they differ.

    ``before`` and ``after`` are JSON values; ``note`` says why, where that is not plain.
    """

    subject: Literal["config", "tensor", "file"]
    kind: Kind
    old: str | None
    new: str | None
    before: Any = None
    after: Any = None
    note: str = ""

    def line(self) -> str:
        """The change in one line."""
        old, new = self.old or "", self.new or ""
        if self.kind == "changed" or (self.kind == "dropped" and self.subject == "config"):
            old += f" {json.dumps(self.before)}"
        if self.kind in ("changed", "added"):
            new += f" {json.dumps(self.after)}"
        text = f"{old} -> {new}" if old and new and self.kind != "kept" else old or new
        return f"{self.subject:6}  {self.kind:7}  {text}" + (f": {self.note}" if self.note else "")


@dataclass
class Report:
    """What an export or import did. ``layout`` is the format written, or the one found."""

    command: Literal["export", "import"]
    source: str
    output: str
    layout: str
    changes: list[Change] = field(default_factory=list)
    not_carried: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One line a change; fields and tensors that kept their names are only counted."""
        kept = Counter(change.subject for change in self.changes if change.kind == "kept")
        shown = [c.line() for c in self.changes if c.kind != "kept" or c.subject == "file"]
        return [
            f"{self.command} of {self.source}: layout {self.layout}",
            *shown,
            f"kept as they are: {kept['config']} config fields, {kept['tensor']} tensors",
            *(f"not carried: {what}" for what in self.not_carried),
            f"written: {self.output}",
        ]

    def write(self, path: Path) -> None:
        """Write everything, kept fields and tensors too, as JSON."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")


def export_draft(
    draft: str | Path, form: str, output: Path, dtype: str = "keep", report: Path | None = None
) -> Report:
    """Write a draft as another tool's checkpoint; ``form`` is one of ``layouts.FORMATS``.

    Tensors keep their values and types unless ``dtype`` is ``float32`` or ``bfloat16``. The manifest
    and a recorded trace are copied along. Raises ``ValueError`` for a draft that cannot be read or an
    output that exists; nothing is left behind then.
    """
    source = _Source.open(draft, parse_config)
    cast = None if dtype == "keep" else getattr(torch, dtype)
    manifest = read_manifest(source.folder)
    target = None if manifest is None else manifest.target.name
    raw = write_layout(form, source.config, source.dtype if cast is None else dtype, target)
    done = Report("export", str(source.folder), str(output), form)
    done.not_carried = not_carried(form, target)
    done.changes += field_changes(
        flatten(source.raw),
        flatten(raw),
        lambda path: their_path(our_path(path, source.layout), form),
    )
    done.changes += source.tensor_changes(lambda name: their_tensor(name, form), cast)
    rounded = cast == torch.bfloat16 and set(source.dtypes.values()) != {torch.bfloat16}
    with atomic_folder(output) as folder:
        source.save(folder, raw, lambda name: their_tensor(name, form), cast)
        done.changes += _copy_along(source.folder, folder, rounded)
        if report is not None:
            done.write(report)
    return done


def import_draft(
    source_folder: str | Path, output: Path, given: Mapping[str, Any], report: Path | None = None
) -> Report:
    """Write another tool's draft as a checkpoint of this toolkit, which ``load_draft`` reads.

    ``given`` supplies fields that the source does not say (``layouts.FLAGS``). A manifest is taken
    over if it still describes the draft, and a recorded trace with it. Raises ``ValueError`` naming
    the file and field or tensor that is missing, unknown or cannot be served, and for an output that
    exists; nothing is left behind then.
    """
    source = _Source.open(source_folder, lambda raw: parse_layout(raw, given))
    raw = source.config.to_json(source.dtype)
    done = Report("import", str(source.folder), str(output), source.layout)
    done.changes += field_changes(
        flatten(source.raw), flatten(raw), lambda path: our_path(path, source.layout)
    )
    done.changes += source.tensor_changes(lambda name: name, None)
    with atomic_folder(output) as folder:
        source.save(folder, raw, lambda name: name, None)
        done.changes += _take_over(source.folder, folder)
        if report is not None:
            done.write(report)
    return done


@dataclass
class _Source:
    """A checkpoint of any layout, of which config and tensor headers have been read and checked.

    ``names``, ``dtypes`` are by our tensor names; ``dropped`` are stored names that are not kept.
    """

    folder: Path
    raw: dict[str, Any]
    layout: str
    config: DraftConfig
    names: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str | Path, parse: Callable[[Any], DraftConfig]) -> "_Source":
        """Read config and headers; raises ``ValueError`` for whatever a draft must not have."""
        found = resolve_folder(folder)
        path = found / "config.json"
        raw = read_object(path)
        try:
            config = parse(raw)
        except ValidationError as error:
            raise ValueError(f"{path}: {describe(error)}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        source = cls(found, raw, detect_layout(raw), config)
        source._read_headers()
        return source

    def _read_headers(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        for stored_name, stored in tensor_slices(self.folder):
            name = self._our_name(stored_name)
            if name is None:
                continue
            if name in shapes:
                raise ValueError(
                    f"{self.folder}: tensor {name!r} is there twice, as {self.names[name]!r} and "
                    f"{stored_name!r}; keep one of them."
                )
            shapes[name] = tuple(stored.get_shape())
            self.names[name] = stored_name
            self.dtypes[name] = stored[:0].dtype if shapes[name] else torch.float32
            self.sizes[name] = torch.Size(shapes[name]).numel()
        check_shapes(self.folder, self.config, expected_shapes(self.config), shapes)

    def _our_name(self, stored: str) -> str | None:
        try:
            name = our_tensor(stored, self.layout)
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}") from None
        if name is None:
            self.dropped[stored] = "a copy of the target's own"
        elif is_rotary(name):
            self.dropped[stored] = "computed anew from the base"
            return None
        return name

    @property
    def dtype(self) -> str:
        """The type that most stored values have."""
        count: Counter[torch.dtype] = Counter()
        for name, dtype in self.dtypes.items():
            count[dtype] += self.sizes[name]
        return str(count.most_common(1)[0][0]).removeprefix("torch.")

    def tensor_changes(
        self, rename: Callable[[str], str], cast: torch.dtype | None
    ) -> list[Change]:
        """What becomes of each tensor under ``rename`` (our name to the new one)."""
        changes = []
        for name, stored in self.names.items():
            new, before = rename(name), str(self.dtypes[name]).removeprefix("torch.")
            if cast is not None and cast != self.dtypes[name]:
                after = str(cast).removeprefix("torch.")
                changes.append(Change("tensor", "changed", stored, new, before, after))
            else:
                kind: Kind = "kept" if new == stored else "renamed"
                changes.append(Change("tensor", kind, stored, new))
        changes += [
            Change("tensor", "dropped", stored, None, note=why)
            for stored, why in self.dropped.items()
        ]
        return changes

    def save(
        self,
        folder: Path,
        raw: dict[str, Any],
        rename: Callable[[str], str],
        cast: torch.dtype | None,
    ) -> None:
        """Write ``raw`` and the tensors under their new names into ``folder``."""
        ours = {stored: name for name, stored in self.names.items()}
        tensors: dict[str, Tensor] = {}
        for stored_name, stored in tensor_slices(self.folder):
            if stored_name in ours:
                tensor = stored[:]
                tensors[rename(ours[stored_name])] = tensor if cast is None else tensor.to(cast)
        try:
            save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"the weights could not be written: {error}") from None
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def field_changes(old: Flat, new: Flat, place: Callable[[str], str]) -> list[Change]:
    """What became of each config field of ``old``; ``place`` gives the new path of an old one."""
    changes = []
    reached = set()
    for path, value in old.items():
        there = place(path)
        if there not in new:
            changes.append(Change("config", "dropped", path, None, before=value))
            continue
        reached.add(there)
        if new[there] != value:
            note = ONE_UP if LAYER_IDS in (path, there) else ""
            changes.append(Change("config", "changed", path, there, value, new[there], note))
        else:
            changes.append(Change("config", "kept" if there == path else "renamed", path, there))
    changes += [
        Change("config", "added", None, path, after=value)
        for path, value in new.items()
        if path not in reached
    ]
    return changes


# -- manifest and trace --------------------------------------------------------------------------


def _copy_along(source: Path, folder: Path, rounded: bool) -> list[Change]:
    """Copy manifest and trace byte for byte; a trace says nothing of weights that were rounded."""
    changes = []
    for name in (MANIFEST_NAME, TRACE_NAME):
        if not (source / name).is_file():
            continue
        if name == TRACE_NAME and rounded:
            why = "recorded with the weights as they were before the cast"
            changes.append(Change("file", "dropped", name, None, note=why))
            continue
        shutil.copyfile(source / name, folder / name)
        changes.append(Change("file", "kept", name, name))
    return changes


def _take_over(source: Path, folder: Path) -> list[Change]:
    """Copy manifest and trace into the imported ``folder`` unless they describe another draft."""
    if not (source / MANIFEST_NAME).is_file():
        if not (source / TRACE_NAME).is_file():
            return []
        why = "without a manifest nothing says of which draft it was recorded"
        return [Change("file", "dropped", TRACE_NAME, None, note=why)]
    changes = _copy_along(source, folder, rounded=False)
    contract, _, _ = check_draft(folder)
    if not contract.errors:
        return changes
    names = ", ".join(dict.fromkeys(finding.name for finding in contract.errors))
    why = f"describes another draft: {names} differ"
    for change in changes:
        assert change.new is not None
        (folder / change.new).unlink()
    return [Change("file", "dropped", change.old, None, note=why) for change in changes]
