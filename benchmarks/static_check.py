"""`domino check --static` on a draft for an 8B target: seconds, memory, and bytes that are stored."""

import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from transformers import Qwen3Config

from domino_kit.checkpoint import expected_shapes
from domino_kit.config import DraftConfig
from domino_kit.draft_contract import stored_shapes
from domino_kit.fingerprint import DRAFT_ROWS, json_hash, slice_fingerprint, target_fingerprints
from domino_kit.manifest import (
    MANIFEST_NAME,
    Manifest,
    TargetIdentity,
    config_facts,
    library_versions,
)
from domino_kit.target import load_tokenizer

LAYERS = (1, 9, 17, 25, 33)
PEAK = """import pathlib, resource, subprocess, sys
status = subprocess.run(sys.argv[2:]).returncode
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
pathlib.Path(sys.argv[1]).write_text(str(peak))
sys.exit(status)"""
"""Linux counts what a process held before its exec as the child's, so a small one must start it."""


def qwen3_8b() -> Qwen3Config:
    """Qwen3-8B's sizes."""
    return Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=False, eos_token_id=151645, rope_theta=1e6,
    )  # fmt: skip


def target_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen3 checkpoint."""
    size, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv = config.num_attention_heads * width, config.num_key_value_heads * width
    layer = {
        "input_layernorm": (size,), "post_attention_layernorm": (size,),
        "self_attn.q_proj": (heads, size), "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size), "self_attn.o_proj": (size, heads),
        "self_attn.q_norm": (width,), "self_attn.k_norm": (width,),
        "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }  # fmt: skip
    table = (config.vocab_size, size)
    shapes = {"model.embed_tokens.weight": table, "lm_head.weight": table,
              "model.norm.weight": (size,)}  # fmt: skip
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}.weight": each for name, each in layer.items()}
    return shapes


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A bfloat16 safetensors file of zeros that takes no room on the disk; returns its bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, count = end, 2
        for extent in shape:
            count *= extent
        end = start + count
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def make_pair(folder: Path) -> tuple[Path, Path, int]:
    """Target, draft and their stored bytes."""
    target, draft = folder / "target", folder / "draft"
    draft.mkdir(parents=True)
    text = qwen3_8b()
    text.save_pretrained(target)
    size = write_sparse(target / "model.safetensors", target_shapes(text))
    config = DraftConfig(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=5, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6,
        max_position_embeddings=40960, block_size=16, num_target_layers=36,
        target_layer_ids=LAYERS, mask_token_id=151669, projector_type="domino", shift_label=True,
        gru_hidden_dim=1024, emb_dim=256,
    )  # fmt: skip
    (draft / "config.json").write_text(json.dumps(config.to_json("bfloat16")))
    size += write_sparse(draft / "model.safetensors", expected_shapes(config))
    facts = config_facts(text)
    vocabulary = load_tokenizer(str(target), False).get_vocab()
    identity = TargetIdentity(
        name=str(target), config_hash=json_hash(facts), embedding_hash="", head_hash="",
        tokenizer_hash=json_hash(vocabulary), chat_template_hash=None, thinking=None,
        config=facts, weights=target_fingerprints(target),
    )  # fmt: skip
    slices, _ = stored_shapes(draft)
    manifest = Manifest(
        toolkit_version="0", libraries={}, command=[], git_commit=None, seed=0, recipe={},
        target=identity, mask_token_id=151669, mask_token_source="recipe",
        target_layer_ids=list(LAYERS), last_layer_norm=None, rope={"rope_theta": 1e6},
        shift_label=True, block_size=16, num_proposals=15, weights_dtype="bfloat16", data={},
        training={}, measured={}, draft=config.model_dump(mode="json"),
        weights={name: slice_fingerprint(each, DRAFT_ROWS) for name, each in slices.items()},
    )  # fmt: skip
    (draft / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return target, draft, size


@click.command()
@click.option("--json", "output", type=click.Path(path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False),
              help="Where to make the files; default: a temporary folder.")  # fmt: skip
def main(output: Path | None, folder: Path | None) -> None:
    """Make the files, run the command on them as a process of its own, and print one line."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        target, draft, size = make_pair(Path(made))
        report = Path(made) / "report.json"
        command = [str(Path(sys.executable).parent / "domino"), "check", "--static", "--draft",
                   str(draft), "--target", str(target), "--output", str(report)]  # fmt: skip
        kib = Path(made) / "peak"
        started = time.monotonic()
        status = subprocess.run([sys.executable, "-S", "-c", PEAK, kib, *command], check=False)
        seconds = time.monotonic() - started
        assert status.returncode in (0, 1)
        verdict, peak = json.loads(report.read_text())["verdict"], int(kib.read_text()) / 2**20
    row = {"variant": "static check", "shape": "Qwen3-8B", "seconds": seconds, "peak_gib": peak,
           "stored_gib": size / 2**30, "verdict": verdict, "libraries": library_versions()}  # fmt: skip
    print(f"{verdict}: {seconds:.1f} s, peak {peak:.2f} GiB, {size / 2**30:.1f} GiB stored")
    if output is not None:
        output.write_text(json.dumps([row], indent=1) + "\n")


if __name__ == "__main__":
    main()
