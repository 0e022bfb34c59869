"""Every command in the README runs: as it stands, or on a small target instead of a large one."""

import re
import shlex
from pathlib import Path

import pytest

from tests.command import domino
from tests.tiny_chat import chat_rows, save_target, write_jsonl

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = {
    "make demo": "test_demo.py runs `domino demo`, all that this target adds to its set-up",
    "make test": "this very suite",
    "pip install '.[serve]'": "the set-up of `make venv` installs the same package",
    "domino serve --draft runs/qwen3-8b": "test_serve_command.py runs it with a small draft",
    "domino check --draft runs/qwen3-8b --engine both": "test_check_faults.py runs it",
    "domino eval-acceptance --draft runs/qwen3-8b --prompts gsm8k --engine sglang "
    "--concurrency 1,4,16": "test_eval_engine.py runs it with a small draft",
}
SMALL = (
    "draft.num_layers=1", "draft.target_layer_ids=[0,2]", "draft.block_size=4",
    "draft.mask_token_id=1", "draft.gru_hidden_dim=8", "draft.emb_dim=8",
    "target.thinking=null", "train.num_anchors=4", "train.epochs=1",
)  # fmt: skip


def readme_commands() -> list[str]:
    """The lines of all bash blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_is_covered() -> None:
    commands = readme_commands()
    assert set(ELSEWHERE) <= set(commands)
    for command in commands:
        assert command in ELSEWHERE or command.startswith(
            ("domino prepare", "domino train", "domino eval")
        )


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_domino_commands_run_in_their_order(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    write_jsonl(tmp_path / "prompts.jsonl", chat_rows(4))
    write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "1+1?", "answer": "2"}])
    ran = 0
    for command in readme_commands():
        if command in ELSEWHERE:
            continue
        arguments = shlex.split(command)[1:]
        if arguments[0] == "train":
            arguments += [f"target.name={target}", *SMALL]
        elif arguments[0] == "prepare":
            arguments[arguments.index("Qwen/Qwen3-8B")] = str(target)
            arguments += ["--max-new-tokens", "8"]
        else:
            arguments[arguments.index("gsm8k")] = "gsm8k=gsm8k.jsonl"
            arguments += ["--max-new-tokens", "8"]
        result = domino(*arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        ran += 1
    assert ran == 4
    assert (tmp_path / "report.json").exists()


@pytest.mark.parametrize("link", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    file, _, heading = link.partition("#")
    assert (ROOT / file).exists()
    if heading:
        headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), flags=re.MULTILINE)
        assert heading in {each.lower().replace(" ", "-") for each in headings}
