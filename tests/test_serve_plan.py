"""`domino serve` before a server is started: the command, and everything that is refused."""

import importlib.metadata
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from domino_kit.checkpoint import save_draft
from domino_kit.fingerprint import json_hash
from domino_kit.serve.flags import ALIASES, READ, read_flags, whole_number
from domino_kit.serve.plan import ServeOptions, ServePlan, plan_serve
from domino_kit.target import load_tokenizer
from tests.tiny import manifest_for, tiny_draft

TARGET: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
"""The config of a target that the tiny draft fits."""


@pytest.fixture(autouse=True)
def tested_sglang(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Pretend that a tested SGLang is installed; calling the fixture pretends another, or none."""
    real = importlib.metadata.version

    def pretend(version: str | None) -> None:
        def found(name: str) -> str:
            if name != "sglang":
                return real(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", found)

    pretend("0.5.23")
    return pretend


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one place where the device is resolved says that there is a GPU."""
    monkeypatch.setattr("domino_kit.serve.plan.resolve_device", lambda wanted: "cuda")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the Domino draft ``draft`` and its target ``target``."""
    save_draft(tmp_path / "draft", tiny_draft(), None, torch.float32)
    write_target(tmp_path)
    return tmp_path


def write_target(place: Path, **changes: Any) -> None:
    (place / "target").mkdir(exist_ok=True)
    (place / "target" / "config.json").write_text(json.dumps({**TARGET, **changes}))


def change_draft(place: Path, **changes: Any) -> None:
    path = place / "draft" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def plain_draft(place: Path) -> None:
    """Replace the draft by one without a head."""
    save_draft(
        place / "draft", tiny_draft(False, projector="none"), None, torch.float32, replace=True
    )


def plan(
    place: Path,
    *extra: str,
    environ: dict[str, str] | None = None,
    check_port: bool = False,
    **options: Any,
) -> ServePlan:
    """Plan to serve the draft of ``place`` on a CPU; ``extra`` is what stands after ``--``."""
    given = {"target": str(place / "target"), "device": "cpu", **options}
    chosen = ServeOptions(draft=str(place / "draft"), extra=extra, **given)
    return plan_serve(chosen, environ or {}, check_port=check_port)


def refuse(words: list[str], place: Path, *extra: str, **options: Any) -> str:
    """Assert one sentence with all of ``words``."""
    with pytest.raises(ValueError) as error:
        plan(place, *extra, **options)
    message = str(error.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message
    assert not re.search(r"[.!?] [A-Z]", message), message
    return message


def values(command: list[str]) -> dict[str, str | None]:
    """The flags of a command, none of them twice."""
    names = [word for word in command if word.startswith("--")]
    assert len(set(names)) == len(names), names
    return dict(read_flags(command))


# -- the command -----------------------------------------------------------------------------


def test_command_on_a_cpu(place: Path) -> None:
    """Every flag and variable that a server on a CPU needs, and nothing else."""
    found = plan(place)
    assert found.command[:4] == [sys.executable, "-P", "-m", "sglang.launch_server"]
    assert values(found.command) == {
        "--model-path": str(place / "target"),
        "--speculative-algorithm": "DOMINO",
        "--speculative-draft-model-path": str(place / "draft"),
        "--speculative-draft-model-quantization": "unquant",
        "--host": "127.0.0.1",
        "--port": "30000",
        "--device": "cpu",
        "--dtype": "float32",
        "--speculative-domino-candidate-pool-size": "0",
        "--attention-backend": "domino_cpu",
        "--sampling-backend": "pytorch",
        "--disable-cuda-graph": None,
        "--disable-overlap-schedule": None,
        "--sleep-on-idle": None,
        "--max-total-tokens": "32768",
    }
    assert found.environment == {"SGLANG_PLATFORM": "domino_cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert found.notes == []


def test_facts_of_the_plan(place: Path) -> None:
    """What the rest of the command needs to know is in the plan, resolved."""
    found = plan(place, host="0.0.0.0", port=8123)
    assert (found.target, found.draft) == (str(place / "target"), place / "draft")
    assert (found.device, found.dtype, found.block_size) == ("cpu", "float32", 4)
    assert (found.host, found.port) == ("0.0.0.0", 8123)
    assert found.config.has_head and found.manifest is None


@pytest.mark.usefixtures("gpu")
def test_command_on_a_gpu(place: Path) -> None:
    """SGLang's own path on CUDA: no platform, no CPU flags, bfloat16."""
    found = plan(place, device="auto")
    assert found.environment == {}
    assert (found.device, found.dtype) == ("cuda", "bfloat16")
    flags = values(found.command)
    assert flags["--device"] == "cuda" and flags["--dtype"] == "bfloat16"
    assert flags["--speculative-domino-candidate-pool-size"] == "0"
    assert not flags.keys() & {"--attention-backend", "--max-total-tokens", "--disable-cuda-graph"}


def test_a_draft_without_a_head_is_dflash(place: Path) -> None:
    """A plain DFlash draft is served under SGLang's own name, without a candidate pool."""
    plain_draft(place)
    flags = values(plan(place).command)
    assert flags["--speculative-algorithm"] == "DFLASH"
    assert "--speculative-domino-candidate-pool-size" not in flags


def test_extra_flags_come_last_and_unchanged(place: Path) -> None:
    extra = ("--log-level", "warning", "--served-model-name=x y")
    assert plan(place, *extra).command[-3:] == list(extra)


@pytest.mark.parametrize(
    ("extra", "left_out"),
    [
        (["--attention-backend", "domino_cpu"], "--attention-backend"),
        (["--sampling-backend=pytorch"], "--sampling-backend"),
        (["--disable-cuda-graph"], "--disable-cuda-graph"),
        (["--disable-overlap-schedule"], "--disable-overlap-schedule"),
        (["--max-total-tokens", "99"], "--max-total-tokens"),
        (["--max-total", "99"], "--max-total-tokens"),
        (["--mem-fraction-static=0.1"], "--max-total-tokens"),
        (["--speculative-domino-candidate-pool-size", "0"], "--speculative-domino"),
    ],
)
def test_extra_flags_replace_defaults(place: Path, extra: list[str], left_out: str) -> None:
    """A default is left out where the user gives the flag, however it is written."""
    command = plan(place, *extra).command
    before = command[: -len(extra)]
    assert command[-len(extra) :] == extra
    assert not [word for word in before if word.startswith(left_out)]


def test_shell_line_round_trips(place: Path) -> None:
    """The printed line is the same command and environment after a shell has read it."""
    found = plan(place, "--served-model-name", 'it\'s a $NAME; "x"')
    line = found.shell_line()
    assert "\n" not in line
    words = shlex.split(line)
    settings = [f"{name}={value}" for name, value in found.environment.items()]
    assert words == [*settings, *found.command]
    shown = ["bash", "-c", line.replace(sys.executable, "env printf '%s\\n'", 1)]
    printed = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == found.command[1:]


def test_nothing_heavy_is_imported(place: Path) -> None:
    """Planning imports no SGLang, and the module itself no PyTorch either."""
    script = f"""
import importlib.metadata, sys
found = importlib.metadata.version
importlib.metadata.version = lambda name: "0.5.23" if name == "sglang" else found(name)
from domino_kit.serve.plan import ServeOptions, plan_serve
assert not {{"torch", "transformers", "sglang"}} & set(sys.modules)
options = ServeOptions({str(place / "draft")!r}, {str(place / "target")!r}, device="cpu")
print(plan_serve(options, {{}}, check_port=False).shell_line())
assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [plan(place).shell_line()]


# -- SGLang's version and the environment ------------------------------------------------------


def test_sglang_is_missing(place: Path, tested_sglang: Callable[[str | None], None]) -> None:
    tested_sglang(None)
    refuse(["not installed", "pip install 'domino-kit[serve]'"], place)


def test_other_versions_need_a_yes(
    place: Path, tested_sglang: Callable[[str | None], None]
) -> None:
    """Another version is refused, and with the variable set it is a note."""
    tested_sglang("0.5.24")
    refuse(["0.5.24", "0.5.23", "DOMINO_KIT_ANY_SGLANG=1"], place)
    refuse(["0.5.24"], place, environ={"DOMINO_KIT_ANY_SGLANG": "0"})
    (note,) = plan(place, environ={"DOMINO_KIT_ANY_SGLANG": "1"}).notes
    assert "0.5.24" in note


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SGLANG_PLUGINS": "other"}, ["SGLANG_PLUGINS", "'other'", "unset", "add domino"]),
        ({"SGLANG_PLUGINS": "dominoes, x"}, ["SGLANG_PLUGINS", "domino"]),
        ({"SGLANG_PLATFORM": "npu"}, ["SGLANG_PLATFORM", "'npu'", "cpu", "unset"]),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, ["SGLANG_USE_CPU_ENGINE=1", "unset"]),
    ],
)
def test_environment_that_keeps_the_plugin_out(
    place: Path, environ: dict[str, str], words: list[str]
) -> None:
    refuse(words, place, environ=environ)


@pytest.mark.parametrize("platform", ["domino_cpu", "npu"])
@pytest.mark.usefixtures("gpu")
def test_a_platform_on_a_gpu(place: Path, platform: str) -> None:
    """With any platform chosen, SGLang would not use CUDA, or not load this plugin."""
    refuse(
        ["SGLANG_PLATFORM", platform, "cuda", "unset"], place, environ={"SGLANG_PLATFORM": platform}
    )


@pytest.mark.parametrize(
    "environ",
    [
        {"SGLANG_PLUGINS": "a, domino"},
        {"SGLANG_PLUGINS": ""},
        {"SGLANG_PLATFORM": "domino_cpu"},
        {"SGLANG_PLATFORM": ""},
        {"SGLANG_USE_CPU_ENGINE": "0"},
    ],
)
def test_environment_that_fits(place: Path, environ: dict[str, str]) -> None:
    assert plan(place, environ=environ).notes == []


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, ["--device", "'tpu'", "auto, cpu, cuda"]),
        ({"device": "cuda:1"}, ["--device", "'cuda:1'", "CUDA_VISIBLE_DEVICES"]),
        ({"dtype": "int8"}, ["--dtype", "'int8'", "float32, bfloat16, float16"]),
        ({"port": 0}, ["--port", "0", "1 to 65535"]),
        ({"port": 65536}, ["--port", "65536", "1 to 65535"]),
    ],
)
def test_wrong_options(place: Path, options: dict[str, Any], words: list[str]) -> None:
    refuse(words, place, **options)


def test_no_gpu(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse(["cuda", "no CUDA device"], place, device="cuda")
    assert plan(place, device="auto").device == "cpu"


def test_gpu_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert plan(place, device="auto").device == "cuda"
    assert plan(place, device="cuda").device == "cuda"
    assert plan(place, device="cpu").device == "cpu"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.usefixtures("gpu")
def test_a_head_on_a_gpu_needs_bfloat16(place: Path, dtype: str) -> None:
    refuse(["--dtype", dtype, "bfloat16", "GPU"], place, dtype=dtype)
    plain_draft(place)
    assert plan(place, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_on_a_cpu(place: Path, dtype: str) -> None:
    assert values(plan(place, dtype=dtype).command)["--dtype"] == dtype


def test_port_in_use(place: Path) -> None:
    """A busy port is named; printing a command beside a running server is still possible."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [f"127.0.0.1:{port}", "in use", "--port"]
        refuse(words, place, port=port, check_port=True)
        refuse([f"0.0.0.0:{port}"], place, host="0.0.0.0", port=port, check_port=True)
        assert plan(place, port=port).port == port
    assert plan(place, port=port, check_port=True).port == port


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_host_of_another_machine(place: Path, host: str) -> None:
    refuse([f"{host}:30000", "--host"], place, host=host, check_port=True)


# -- the draft ---------------------------------------------------------------------------------


def test_no_such_draft(place: Path) -> None:
    (place / "draft").rename(place / "elsewhere")
    refuse(["draft", "not a folder"], place)


def test_unreadable_draft_config(place: Path) -> None:
    (place / "draft" / "config.json").write_text("{")
    refuse(["config.json", "JSON"], place)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["DominoDraftModel"]}, ["architectures", "DFlashDraftModel"]),
        ({"architectures": ["Qwen3DFlashDraftModel"]}, ["architectures", "DFlashDraftModel"]),
        ({"model_type": "domino"}, ["model_type", "'domino'", "qwen3"]),
        ({"model_type": None}, ["model_type", "None", "qwen3"]),
    ],
)
def test_configs_that_sglang_cannot_read(
    place: Path, changes: dict[str, Any], words: list[str]
) -> None:
    """Layouts of other tools that this toolkit reads but SGLang does not."""
    change_draft(place, **changes)
    refuse(["config.json", "SGLang", "domino import", *words], place)


def test_missing_weights(place: Path) -> None:
    (place / "draft" / "model.safetensors").unlink()
    refuse(["model.safetensors", "draft"], place)


def test_cut_weights(place: Path) -> None:
    path = place / "draft" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refuse(["model.safetensors", "not a readable safetensors file"], place)


@pytest.mark.parametrize(
    "prefix", ["draft_model.", "dflash_module.", "logit_head.", "model.model."]
)
def test_tensor_names_that_sglang_skips(place: Path, prefix: str) -> None:
    """SGLang ignores unknown names, so such a draft would be served with random weights."""
    path = place / "draft" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{prefix}fc.weight"] = tensors.pop("fc.weight")
    save_file(tensors, path)
    refuse([f"{prefix}fc.weight", "'fc.weight'", "domino import"], place)


def test_tensor_names_that_sglang_reads(place: Path) -> None:
    path = place / "draft" / "model.safetensors"
    tensors = {f"model.{name}": tensor for name, tensor in load_file(path).items()}
    tensors["encoder.fc.weight"] = tensors.pop("model.fc.weight")
    save_file(tensors, path)
    assert plan(place).notes == []


def test_sharded_weights(place: Path) -> None:
    """An index counts as weights if all of its files are there."""
    draft = place / "draft"
    names = list(load_file(draft / "model.safetensors"))
    index = draft / "model.safetensors.index.json"
    (draft / "model.safetensors").rename(draft / "shard.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "shard.safetensors")}))
    assert plan(place).notes == []
    (draft / "shard.safetensors").unlink()
    refuse(["index", "shard.safetensors", "not in"], place)
    for content in ("{", "{}", '{"weight_map": 3}', '{"weight_map": {"fc.weight": 3}}', "[]"):
        index.write_text(content)
        refuse([index.name, "not a valid"], place)


def test_an_output_folder_with_links_is_a_draft(place: Path) -> None:
    """As training leaves it: config and weights are relative links into a checkpoint folder."""
    (place / "draft").rename(place / "step-5")
    (place / "draft").mkdir()
    for file in (place / "step-5").iterdir():
        (place / "draft" / file.name).symlink_to(Path("..") / "step-5" / file.name)
    assert plan(place).draft == place / "draft"
    (place / "step-5" / "model.safetensors").unlink()
    refuse(["model.safetensors"], place)


# -- the target --------------------------------------------------------------------------------


def test_target_of_the_manifest(place: Path) -> None:
    """Without --target it is the one in training; with another name there is a note."""
    refuse(["manifest", "--target"], place, target=None)
    manifest = manifest_for(str(place / "target"))
    vocabulary = load_tokenizer(str(place / "target"), False).get_vocab()
    identity = manifest.target.model_copy(update={"tokenizer_hash": json_hash(vocabulary)})
    manifest = manifest.model_copy(update={"target": identity})
    save_draft(place / "draft", tiny_draft(), manifest, torch.float32, replace=True)
    found = plan(place, target=None)
    assert found.target == str(place / "target")
    assert found.manifest is not None and found.manifest.target == identity
    assert plan(place).notes == []
    (place / "target").rename(place / "moved")
    (note,) = plan(place, target=str(place / "moved")).notes
    assert str(place / "target") in note and "trained for" in note and "acceptance" in note


def test_target_in_the_home_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would take ~ for a folder's name."""
    monkeypatch.setenv("HOME", str(place))
    assert plan(place, target="~/target").target == str(place / "target")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["not a model folder", "config.json"]),
        ("{", ["cannot be read", "JSON"]),
        ("[]", ["cannot be read"]),
        ('{"model_type": "zzz"}', ["cannot be read", "zzz"]),
        ('{"model_type": "qwen3", "hidden_size": "x"}', ["cannot be read", "hidden_size", "'x'"]),
        (
            '{"model_type": "zzz", "hidden_size": 8, "auto_map": {"AutoConfig": "code.Config"}}',
            ["custom code", "-- --trust-remote-code"],
        ),
    ],
)
def test_unreadable_targets(place: Path, content: str | None, words: list[str]) -> None:
    """Whatever transformers says about a damaged config is one line that names the target."""
    path = place / "target" / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as error:
        plan(place)
    said = str(error.value)
    assert [w for w in [str(place / "target"), *words] if w not in said] == [], said
    assert "\n" not in said


def test_flags_that_change_the_target_count_here_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config is read under the same revision and permission as SGLang will."""
    seen: list[dict[str, Any]] = []
    real = AutoConfig.from_pretrained

    def record(name: str, **given: Any) -> Any:
        seen.append(given)
        return real(name)

    monkeypatch.setattr(AutoConfig, "from_pretrained", record)
    plan(place)
    plan(place, "--trust-remote-code", "--revision", "v2")
    own = [each for each in seen if "_from_auto" not in each]  # the tokenizer reads it as well
    assert own == [
        {"revision": "main", "trust_remote_code": False},
        {"revision": "v2", "trust_remote_code": True},
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 33}, ["vocab_size", "33", "32", "--target"]),
        ({"hidden_size": 64}, ["hidden_size", "64", "32", "--target"]),
        ({"num_hidden_layers": 5}, ["num_hidden_layers", "5", "4", "--target"]),
        ({"model_type": "qwen2"}, ["qwen2", "SGLang 0.5.23", "hidden states"]),
        ({"max_position_embeddings": 1024}, ["1024", "512", "-- --context-length 512"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["1024", "512"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantised", "fp8", "CPU", "--target"]),
        (
            {
                "use_sliding_window": True, "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            ["sliding-window", "CPU"],
        ),
        ({"model_type": "qwen3_next"}, ["linear_attention", "hybrid", "CPU"]),
        ({"model_type": "mamba"}, ["linear_attention", "recurrent", "CPU"]),
        ({"model_type": "rwkv"}, ["rwkv", "recurrent", "CPU"]),
        ({"model_type": "recurrent_gemma", "max_position_embeddings": 512}, ["recurrent", "CPU"]),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 8}, ["latent attention", "CPU"]),
    ],
)  # fmt: skip
def test_targets_that_do_not_fit(place: Path, changes: dict[str, Any], words: list[str]) -> None:
    write_target(place, **changes)
    refuse([str(place / "target"), *words], place)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mistral"])
def test_targets_that_fit(place: Path, family: str) -> None:
    write_target(place, model_type=family)
    assert plan(place).notes == []


def test_nested_text_config(place: Path) -> None:
    """A multimodal target is compared by its text part."""
    text = {key: TARGET[key] for key in TARGET if key not in ("model_type", "architectures")}
    raw = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    path = place / "target" / "config.json"
    path.write_text(json.dumps({**raw, "text_config": text}))
    assert plan(place).notes == []
    path.write_text(json.dumps({**raw, "text_config": {**text, "vocab_size": 33}}))
    refuse(["vocab_size", "33", "32"], place)


def test_long_rope_scaling_is_counted_as_sglang_does(place: Path) -> None:
    """A factor counts only where the length in the config is the one before scaling."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    write_target(place, rope_scaling=scaling)
    assert plan(place).notes == []


@pytest.mark.parametrize("length", ["512", "64", "0.5k"])
def test_a_shorter_context_is_served(place: Path, length: str) -> None:
    write_target(place, max_position_embeddings=4096)
    assert plan(place, "--context-length", length).command[-1] == length


@pytest.mark.parametrize(("length", "tokens"), [("513", "513"), ("1k", "1000"), ("1Ki", "1024")])
def test_a_longer_context_is_refused(place: Path, length: str, tokens: str) -> None:
    refuse([tokens, "512", "-- --context-length 512"], place, f"--context-length={length}")


@pytest.mark.usefixtures("gpu")
def test_quantised_targets_on_a_gpu(place: Path) -> None:
    """They are served, with a note: nobody verified them."""
    (note,) = plan(place, "--quantization", "fp8").notes
    assert "quantised" in note and "fp8" in note and "verified" in note
    write_target(place, quantization_config={"quant_method": "awq"})
    (note,) = plan(place).notes
    assert "awq" in note and "unquantised" in note


@pytest.mark.usefixtures("gpu")
def test_what_only_a_gpu_serves(place: Path) -> None:
    """Flags and targets that are refused on a CPU pass on CUDA."""
    write_target(place, layer_types=["full_attention", "sliding_attention"] * 2)
    extra = ["--speculative-draft-window-size", "64", "--attention-backend", "fa3", "--tp-size=2"]
    extra += ["--dp-size", "2", "--page-size", "64"]
    assert plan(place, *extra).command[-len(extra) :] == extra
    write_target(place, model_type="qwen3_next", layer_types=["linear_attention"] * 4)
    assert plan(place).notes == []


# -- flags after -- ------------------------------------------------------------------------------

OWNED = [
    (["--model-path", "x"], ["--model-path", "--target"]),
    (["--model=x"], ["--model-path", "--target"]),
    (["--speculative-draft-model-path", "x"], ["--speculative-draft-model-path", "--draft"]),
    (["--speculative-draft-model=x"], ["--speculative-draft-model-path", "--draft"]),
    (["--speculative-algorithm", "EAGLE"], ["--speculative-algorithm", "leave it out"]),
    (["--speculative-algo=EAGLE"], ["--speculative-algorithm", "leave it out"]),
    (["--speculative-draft-model-quantization", "fp8"], ["quantization", "leave it out"]),
    (["--host", "x"], ["--host", "before"]),
    (["--port=1"], ["--port", "before"]),
    (["--device", "cuda"], ["--device", "before"]),
    (["--dtype", "half"], ["--dtype", "before"]),
    (["--config", "x.yaml"], ["--config", "flags"]),
]  # fmt: skip
FOREIGN = [
    ["--speculative-num-steps", "3"],
    ["--speculative-eagle-topk=4"],
    ["--speculative-token-map", "x"],
    ["--enable-multi-layer-eagle"],
    ["--enable-multi-layer"],
    ["--speculative-adaptive"],
    ["--speculative-ngram-capacity", "5"],
    ["--speculative-dspark-block-size", "5"],
]
BLOCK = "--speculative-num-draft-tokens"
SIZES: list[tuple[list[str], list[str]]] = [
    ([BLOCK, "1"], [BLOCK, "1", "from 2"]),
    ([BLOCK, "5"], [BLOCK, "5", "4", "leave it out"]),
    ([BLOCK, "x"], [BLOCK, "x", "whole number"]),
    ([BLOCK, "-2"], [BLOCK, "-2", "whole number"]),
    ([BLOCK, "2.5"], [BLOCK, "2.5", "whole number"]),
    ([f"{BLOCK}="], [BLOCK, "without a value"]),
    ([BLOCK], [BLOCK, "without a value"]),
    ([BLOCK, "--log-level", "info"], [BLOCK, "without a value"]),
    (["--speculative-dflash-block-size", "9"], ["--speculative-dflash-block-size", "9", "4"]),
    ([BLOCK, "3", "--speculative-dflash-block-size=2"], ["3", "2", "differ", "give one"]),
    (["--speculative-domino-candidate-pool-size", "-1"], ["candidate-pool-size", "from 0"]),
    (["--context-length", "long"], ["--context-length", "long", "whole number"]),
]
PARALLEL = [
    (["--pp-size", "2"], ["--pp-size", "1", "pipeline"]),
    (["--pipeline-parallel-size=2"], ["--pp-size", "1", "pipeline"]),
    (["--enable-dp-attention"], ["DP attention", "Domino head", "--enable-dp-attention"]),
    (["--attn-dp-size", "2"], ["DP attention", "--attn-dp-size"]),
    (["--attention-data-parallel-size", "2"], ["DP attention", "--attn-dp-size"]),
]
ON_A_CPU = [
    (["--tp-size", "2"], ["--tp-size", "CPU"]),
    (["--tp=2"], ["--tp-size", "CPU"]),
    (["--tensor-parallel-size", "2"], ["--tp-size", "CPU"]),
    (["--tp", "many"], ["--tp-size", "many", "whole number"]),
    (["--dp", "2"], ["--dp-size", "CPU"]),
    (["--data-parallel-size=2"], ["--dp-size", "CPU"]),
    (["--attention-backend", "triton"], ["--attention-backend", "triton", "domino_cpu"]),
    (["--attention-backend"], ["--attention-backend", "domino_cpu"]),
    (["--decode-attention-backend=fa3"], ["--decode-attention-backend", "fa3", "domino_cpu"]),
    (["--prefill-attention-backend=fa3"], ["--prefill-attention-backend", "domino_cpu"]),
    (["--speculative-draft-attention-backend=fa3"], ["draft-attention-backend", "domino_cpu"]),
    (["--speculative-draft-window-size", "64"], ["draft-window-size", "CPU", "leave it out"]),
    (["--quantization", "fp8"], ["--quantization", "fp8", "CPU"]),
]


@pytest.mark.parametrize(
    ("extra", "words"), [*OWNED, *SIZES, *PARALLEL, *ON_A_CPU], ids=lambda value: " ".join(value)
)
def test_flags_that_are_refused(place: Path, extra: list[str], words: list[str]) -> None:
    refuse(words, place, *extra)


@pytest.mark.parametrize("extra", FOREIGN, ids=lambda value: value[0])
def test_flags_of_other_drafts(place: Path, extra: list[str]) -> None:
    message = refuse([BLOCK, "block"], place, "--log-level", "info", *extra)
    assert message.startswith(extra[0].partition("=")[0])


@pytest.mark.parametrize(("extra", "words"), [*OWNED, *SIZES, *PARALLEL])
@pytest.mark.usefixtures("gpu")
def test_flags_that_are_refused_on_a_gpu_too(
    place: Path, extra: list[str], words: list[str]
) -> None:
    refuse(words, place, *extra)


def test_dp_attention_without_a_head(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang serves a plain DFlash draft that way, but not the CPU platform."""
    plain_draft(place)
    refuse(["DP attention", "CPU"], place, "--attn-dp-size", "2")
    monkeypatch.setattr("domino_kit.serve.plan.resolve_device", lambda wanted: "cuda")
    assert plan(place, "--attn-dp-size", "2").notes == []


@pytest.mark.parametrize(
    "extra",
    [
        [BLOCK, "3"],
        ["--speculative-dflash-block-size=3"],
        [BLOCK, "3", "--speculative-dflash-block-size", "3"],
        [BLOCK, "2", f"{BLOCK}=3"],
    ],
)
def test_a_shorter_block_is_a_note(place: Path, extra: list[str]) -> None:
    """It is served, but the backbone was trained with more mask rows."""
    found = plan(place, *extra)
    assert found.block_size == 3 and found.config.block_size == 4
    (note,) = found.notes
    assert "3" in note and "4" in note and "acceptance" in note and "\n" not in note


def test_the_trained_block_is_no_note(place: Path) -> None:
    assert plan(place, BLOCK, "4").notes == []


def test_a_candidate_pool_is_a_note(place: Path) -> None:
    """SGLang's pool is approximate unless it holds the whole vocabulary."""
    flag = "--speculative-domino-candidate-pool-size"
    (note,) = plan(place, flag, "8").notes
    assert "approximate" in note and "8" in note
    assert plan(place, flag, "32").notes == []
    plain_draft(place)
    assert plan(place, flag, "8").notes == []


@pytest.mark.parametrize(
    "extra",
    [
        ["--tp-size", "1"], ["--pp-size=1"], ["--attn-dp-size", "1"], ["--page-size", "1"],
        ["--quantization", "unquant"], ["--attention-backend", "domino_cpu"],
    ],
)  # fmt: skip
def test_flags_with_harmless_values(place: Path, extra: list[str]) -> None:
    assert plan(place, *extra).command[-len(extra) :] == extra


# -- reading flags -------------------------------------------------------------------------------


def test_reading_flags() -> None:
    """Both ways to give a value, the last one given, aliases, and what is not known."""
    extra = ["--tp-size", "1", "--tensor-parallel-size=2", "--unknown", "-1", "--page-size", "x",
             "--trust-remote-code", "--revision", "a=b", "--served-model-name=c=d", "--"]  # fmt: skip
    assert read_flags(extra) == {
        "--tp-size": "2", "--unknown": "-1", "--page-size": "x", "--trust-remote-code": None,
        "--revision": "a=b", "--served-model-name": "c=d", "--": None,
    }  # fmt: skip
    assert read_flags([]) == {}


def test_abbreviations() -> None:
    """One that fits a single flag is that flag; one that fits several is left to SGLang."""
    assert read_flags(["--tp", "2", "--context-len=5"]) == {
        "--tp-size": "2",
        "--context-length": "5",
    }
    assert read_flags(["--speculative-d", "2"]) == {"--speculative-d": "2"}
    assert read_flags(["--model", "2"]) == {"--model-path": "2"}


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("12k", 12000), ("1.5k", 1500), ("2Ki", 2048), ("3M", 3 * 10**6), ("1Gi", 2**30)],
)
def test_numbers_with_suffixes(text: str, number: int) -> None:
    assert whole_number({"--context-length": text}, "--context-length", 1) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1 k", "1K", "１", "0x10", "1e3", "1_000", "+1"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"--context-length is .*whole number"):
        whole_number({"--context-length": text}, "--context-length", 1)


# -- against SGLang itself -----------------------------------------------------------------------

ORACLE = """
import argparse, json, sys
from pathlib import Path
import sglang.srt.server_args as server_args
from sglang.srt.arg_groups.choices import add_attention_backend_choices

add_attention_backend_choices(["domino_cpu"])  # as the plugin does
parser = argparse.ArgumentParser()
server_args.ServerArgs.add_cli_args(parser)
names = ("model_path", "device", "dtype", "attention_backend", "max_total_tokens", "tp_size",
         "speculative_algorithm", "speculative_draft_model_path", "host", "port",
         "speculative_draft_model_quantization", "speculative_domino_candidate_pool_size",
         "disable_cuda_graph", "disable_overlap_schedule", "sampling_backend", "context_length")
commands = [parser.parse_args(command) for command in json.load(sys.stdin)]
models = Path(server_args.__file__).parent / "models"
print(json.dumps({
    "parsed": [{name: getattr(found, name) for name in names} for found in commands],
    "flags": [flag for action in parser._actions for flag in action.option_strings],
    "capture": [file.stem for file in models.glob("*.py")
                if "def set_dflash_layers_to_capture" in file.read_text()],
}))
"""


@pytest.mark.sglang
def test_sglang_reads_the_command(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's parser takes every flag as meant, and knows every flag that is looked at."""
    pytest.importorskip("sglang", exc_type=ImportError, reason="SGLang is not installed")
    write_target(place, max_position_embeddings=4096)
    on_cpu = plan(place, "--context-length", "0.5k", "--tp", "1")
    with monkeypatch.context() as patched:
        patched.setattr("domino_kit.serve.plan.resolve_device", lambda wanted: "cuda")
        on_gpu = plan(place, "--context-length=512", "--tp", "2")
    result = subprocess.run(
        [sys.executable, "-c", ORACLE],
        input=json.dumps([on_cpu.command[4:], on_gpu.command[4:]]),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    shared = {
        "model_path": str(place / "target"), "speculative_algorithm": "DOMINO",
        "speculative_draft_model_path": str(place / "draft"), "host": "127.0.0.1", "port": 30000,
        "speculative_draft_model_quantization": "unquant",
        "speculative_domino_candidate_pool_size": 0,
    }  # fmt: skip
    assert found["parsed"] == [
        {
            **shared, "device": "cpu", "dtype": "float32", "attention_backend": "domino_cpu",
            "max_total_tokens": 32768, "disable_cuda_graph": True, "tp_size": 1,
            "disable_overlap_schedule": True, "sampling_backend": "pytorch", "context_length": 500,
        },
        {
            **shared, "device": "cuda", "dtype": "bfloat16", "attention_backend": None,
            "max_total_tokens": None, "disable_cuda_graph": False, "tp_size": 2,
            "disable_overlap_schedule": False, "sampling_backend": None, "context_length": 512,
        },
    ]  # fmt: skip
    assert set(READ) <= set(found["flags"])
    unread = {flag for flag in found["flags"] if flag.startswith("--")} - set(READ)
    for flag in unread:  # none is taken for another one's abbreviation
        assert list(read_flags([flag])) == [ALIASES.get(flag, flag)]
    without = {"qwen2", "qwen2_moe", "qwen2_5_vl", "gemma2", "gemma3_causal", "gemma3_mm", "glm4",
               "glm4_moe", "olmo2", "granite"}  # fmt: skip
    assert {"qwen3", "llama"} <= set(found["capture"])
    assert not without & set(found["capture"])
