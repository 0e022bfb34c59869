"""A checkpoint folder: weights, config and manifest, written whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from domino_kit.config import DraftConfig, read_config, resolve_folder
from domino_kit.fingerprint import (
    WEIGHTS_NAME,
    tensor_fingerprint,
    tensor_hash,
    weight_files,
    weight_sums,
)
from domino_kit.manifest import MANIFEST_NAME, Manifest, read_manifest
from domino_kit.modeling import DominoDraft

PREFIXES = ("draft_model.", "dflash_module.", "logit_head.", "model.")
ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
HEAD_PREFIXES = ("prefix_gru.", "embed_proj.")


@contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``path`` that takes its name once the block has succeeded.

    After an error nothing is left behind and an existing ``path`` is untouched. Raises
    ``ValueError`` if ``path`` exists and ``replace`` is false.
    """
    if path.exists() and not replace:
        raise ValueError(f"{path} already exists; choose another output folder or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield temporary
        _rename_over(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _rename_over(temporary: Path, path: Path) -> None:
    temporary.chmod(0o755)
    if not path.exists():
        temporary.rename(path)
        return
    aside = path.with_name(f".{path.name}-old-{os.getpid()}")
    path.rename(aside)
    temporary.rename(path)
    shutil.rmtree(aside)


def save_draft(
    folder: Path,
    model: DominoDraft,
    manifest: Manifest | None,
    dtype: torch.dtype,
    *,
    replace: bool = False,
    add: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint folder atomically, with weights in ``dtype``.

    The manifest is written with the fingerprints of these very weights; ``add`` may put more files
    into the folder before it takes its name.
    """
    config = model.config.to_json(str(dtype).removeprefix("torch."))
    state = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    with atomic_folder(folder, replace=replace) as temporary:
        try:
            save_file(state, temporary / WEIGHTS_NAME, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"the checkpoint {folder} could not be written: {error}") from None
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if manifest is not None:
            prints = {name: tensor_fingerprint(tensor) for name, tensor in state.items()}
            hashes = {name: tensor_hash(tensor) for name, tensor in state.items()}
            sums = {name: weight_sums(tensor) for name, tensor in state.items()}
            manifest = manifest.model_copy(
                update={"weights": prints, "weight_hashes": hashes, "weight_sums": sums}
            )
            (temporary / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n")
        if add is not None:
            add(temporary)


def load_draft(
    folder: str | Path, dtype: torch.dtype, device: str
) -> tuple[DominoDraft, Manifest | None]:
    """Load a draft of this or another tool, for inference.

    Raises ``ValueError`` naming the file and the tensor or field that does not fit: an unknown,
    missing or misshapen tensor, head tensors that the config would ignore, an unreadable file.
    """
    folder = resolve_folder(folder)
    config = read_config(folder / "config.json")
    manifest = read_manifest(folder)
    tensors = read_tensors(folder)
    with torch.device("meta"):
        model = DominoDraft(config)
    check_shapes(
        folder, config, expected_shapes(config), {k: tuple(v.shape) for k, v in tensors.items()}
    )
    model.load_state_dict({k: v.to(device, dtype) for k, v in tensors.items()}, assign=True)
    return model.eval().requires_grad_(False), manifest


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files under their canonical names."""
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as reader:
                for raw in reader.keys():  # noqa: SIM118  (not a dict)
                    name = canonical_name(raw)
                    if is_rotary(name):
                        continue
                    if name in tensors:
                        raise ValueError(f"{file}: tensor {name!r} is there twice (as {raw!r}).")
                    tensors[name] = reader.get_tensor(raw)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a readable safetensors file ({error}); copy or save it again."
            ) from None
    return tensors


def canonical_name(name: str) -> str:
    """A tensor's name without other tools' prefixes, and under the ecosystem's spelling."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name, stripped = name.removeprefix(prefix), True
    return ALIASES.get(name, name)


def is_rotary(name: str) -> bool:
    """Whether a stored tensor is a rotary buffer, which is never read."""
    return name.startswith("rotary_emb.") or ".rotary_emb." in name


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a config implies."""
    with torch.device("meta"):
        model = DominoDraft(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_shapes(
    folder: Path,
    config: DraftConfig,
    expected: dict[str, tuple[int, ...]],
    found: dict[str, tuple[int, ...]],
) -> None:
    """Raise ``ValueError`` unless the tensors are exactly those that the config implies."""
    head = sorted(name for name in found if name.startswith(HEAD_PREFIXES))
    if head and not config.has_head:
        raise ValueError(
            f"{folder} has Domino head weights ({head[0]}) but its config.json has no "
            "projector_type 'domino': the head would be ignored. Correct the config."
        )
    for name in sorted(set(expected) - set(found)):
        raise ValueError(f"{folder} lacks tensor {name!r} of shape {list(expected[name])}.")
    for name in sorted(set(found) - set(expected)):
        raise ValueError(
            f"{folder} has the unknown tensor {name!r}; a draft holds its backbone and head only "
            "(embedding and output head are the target's)."
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{folder}: tensor {name!r} has shape {list(found[name])}, but config.json "
                f"implies {list(shape)}{_shape_hint(name)}."
            )


def _shape_hint(name: str) -> str:
    """What a head or fc shape is made of, so that the wrong field can be found."""
    hints = {
        "fc.weight": "hidden_size, len(target_layer_ids) * hidden_size",
        "prefix_gru.weight_ih_l0": "3 * gru_hidden_dim, hidden_size",
        "prefix_gru.weight_hh_l0": "3 * gru_hidden_dim, gru_hidden_dim",
        "embed_proj.0.weight": "emb_dim, hidden_size + gru_hidden_dim",
        "embed_proj.2.weight": "vocab_size, emb_dim",
    }
    return f" ([{hints[name]}])" if name in hints else ""
