"""`domino prepare` in this process: rows, resuming, what is dropped, and what is refused."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_kit.chat_template import encode_row, prompt_ids
from domino_kit.conversations import parse_row
from domino_kit.decoding import Sampling, generate
from domino_kit.target import Target, load_target_model, load_tokenizer
from domino_kit.train.answers import Answer, Asking, Question
from domino_kit.train.prepare import run_prepare
from domino_kit.train.prepare_options import PrepareOptions
from domino_kit.train.prepare_output import AnswerFile, provenance, sidecar_path
from domino_kit.train.prepare_prompts import Conversation, read_conversations
from domino_kit.train.prepare_report import Progress, Tally, notes_console
from domino_kit.train.prepare_rows import Rows
from tests.tiny_chat import THINKING, save_target, write_jsonl

NEW = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "model", template=THINKING)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


PROMPTS = [{"id": f"p{i}", "messages": [user(f"say {i}"), assistant("from the data")]}
           for i in range(4)]  # fmt: skip
TWO_TURNS = {"id": "two", "messages": [user("a"), assistant("from the data"), user("b")]}


def prepare(folder: Path, target: Path, records: list[Any], **options: Any) -> list[dict[str, Any]]:
    """The rows of ``folder/answers.jsonl`` after a run."""
    prompts = write_jsonl(folder / "prompts.jsonl", records)
    output = folder / "answers.jsonl"
    chosen = {"max_new_tokens": NEW, "device": "cpu", "dtype": "float32", **options}
    status = run_prepare(
        PrepareOptions(output=output, prompts=str(prompts), target=str(target), **chosen)
    )
    assert status == 0
    return read_rows(output)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_the_targets_own_greedy_ones(tmp_path: Path, target: Path) -> None:
    rows = prepare(tmp_path, target, PROMPTS)
    assert [row["id"] for row in rows] == ["p0/1", "p1/1", "p2/1", "p3/1"]
    tokenizer = load_tokenizer(str(target), False)
    model = Target(load_target_model(str(target), torch.float32, "cpu", False), [0, 2])
    prompts = [prompt_ids(tokenizer, row["messages"][:1], None) for row in rows]
    for row, prompt in zip(rows, prompts, strict=True):
        (plain,) = generate(model, None, [prompt], NEW, [3])
        ended = plain.tokens[-1] == 3
        text = tokenizer.decode(plain.tokens[:-1] if ended else plain.tokens)
        assert row["messages"][-1]["content"] == (text if ended else text.rstrip("\ufffd"))
        assert row["finish"] == ("stop" if ended else "length")


def test_every_turn_is_answered_after_the_targets_own_and_learnt_once(
    tmp_path: Path, target: Path
) -> None:
    first, second = prepare(tmp_path, target, [TWO_TURNS])
    assert [first["id"], second["id"]] == ["two/1", "two/2"]
    own = first["messages"][1]
    assert own["content"] != "from the data"
    assert second["messages"][:3] == [user("a"), {**own, "weight": 0}, user("b")]
    tokenizer = load_tokenizer(str(target), False)
    ids, mask = encode_row(tokenizer, parse_row(second, "f:1"), None, [3])
    learnt = tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
    assert learnt == second["messages"][-1]["content"]


def test_reasoning_of_an_earlier_turn_is_learnt_in_its_own_row(target: Path) -> None:
    tokenizer = load_tokenizer(str(target), False)
    thought = assistant("<think>\ntwo and two\n</think>\n\nfour")
    rows = [
        {"messages": [user("2+2"), thought]},
        {"messages": [user("2+2"), {**thought, "weight": 0}, user("3+3"), assistant("six")]},
    ]
    learnt = []
    for row in rows:
        ids, mask = encode_row(tokenizer, parse_row(row, "f:1"), True, [3])
        learnt.append(tokenizer.decode([t for t, flag in zip(ids, mask, strict=True) if flag]))
    assert learnt == ["<think>\ntwo and two\n</think>\n\nfour<|im_end|>", "six<|im_end|>"]


def test_a_weight_that_is_neither_0_nor_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"turn 2 has the weight 0\.5; allowed are 0 and 1"):
        parse_row({"messages": [user("a"), {**assistant("b"), "weight": 0.5}]}, "f:1")


def test_a_torn_line_is_cut_off_and_the_file_ends_the_same(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, target, [*PROMPTS, TWO_TURNS])
    output = tmp_path / "answers.jsonl"
    whole = output.read_bytes()
    output.write_bytes(whole[:-20])
    capsys.readouterr()
    prepare(tmp_path, target, [*PROMPTS, TWO_TURNS])
    said = capsys.readouterr().err
    assert "cut off line 6, which is torn" in said
    assert "5 answers are there already, 1 to come" in said
    assert output.read_bytes() == whole


def test_sampled_answers_do_not_depend_on_where_a_run_began(tmp_path: Path, target: Path) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    rows = prepare(tmp_path, target, PROMPTS, **options)
    output = tmp_path / "answers.jsonl"
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    prepare(tmp_path, target, PROMPTS, **options)
    assert output.read_bytes() == whole
    (tmp_path / "other").mkdir()
    other = prepare(tmp_path / "other", target, PROMPTS, **{**options, "seed": 6})
    assert [r["messages"] for r in other] != [r["messages"] for r in rows]


def test_rows_out_of_order_are_put_into_the_prompts_order(tmp_path: Path, target: Path) -> None:
    prepare(tmp_path, target, PROMPTS)
    output = tmp_path / "answers.jsonl"
    whole = output.read_bytes()
    output.write_bytes(b"".join(reversed(whole.splitlines(keepends=True))))
    prepare(tmp_path, target, PROMPTS)
    assert output.read_bytes() == whole


def test_other_settings_are_named_and_nothing_is_touched(tmp_path: Path, target: Path) -> None:
    prepare(tmp_path, target, PROMPTS)
    output = tmp_path / "answers.jsonl"
    whole = output.read_bytes()
    with pytest.raises(ValueError, match=r"other settings \(thinking None there and False now\)"):
        prepare(tmp_path, target, PROMPTS, thinking=False)
    assert output.read_bytes() == whole


def test_other_prompts_do_not_mix_into_an_output(tmp_path: Path, target: Path) -> None:
    prepare(tmp_path, target, PROMPTS)
    changed = [{"id": "p0", "prompt": "something else"}, *PROMPTS[1:]]
    with pytest.raises(ValueError, match=r"'p0/1' to another prompt than .*prompts\.jsonl:1"):
        prepare(tmp_path, target, changed)
    with pytest.raises(ValueError, match="'p3/1', but --prompts has no such prompt"):
        prepare(tmp_path, target, PROMPTS[:3])


def test_a_file_of_another_kind_is_never_overwritten(tmp_path: Path, target: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"text": "precious"}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl:1 is not a row that domino prepare"):
        prepare(tmp_path, target, PROMPTS)
    assert (tmp_path / "answers.jsonl").read_text() == '{"text": "precious"}\n'


def test_a_limit_can_be_raised_later(tmp_path: Path, target: Path) -> None:
    assert len(prepare(tmp_path, target, PROMPTS, limit=2)) == 2
    part = (tmp_path / "answers.jsonl").read_bytes()
    assert len(prepare(tmp_path, target, PROMPTS)) == 4
    assert (tmp_path / "answers.jsonl").read_bytes().startswith(part)


def test_drops_are_counted_by_reason(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "  "}, {"prompt": "x" * 600}]
    rows = prepare(tmp_path, target, records)
    assert [row["id"] for row in rows] == ["1/1"]
    said = capsys.readouterr().err
    for part in ("1 duplicate", "1 empty", "1 too long for the context of 512 with 8 new tokens"):
        assert part in said
    facts = json.loads(sidecar_path(tmp_path / "answers.jsonl").read_text())
    assert sum(facts["dropped"].values()) == 3 and facts["rows"] == 1


def test_held_out_prompts_are_the_same_in_every_run(tmp_path: Path, target: Path) -> None:
    records = [{"prompt": f"question {i}"} for i in range(24)]
    held = tmp_path / "held.jsonl"
    options: dict[str, Any] = {"held_out": 0.3, "held_out_output": held, "max_new_tokens": 2}
    kept = prepare(tmp_path, target, records, **options)
    out = read_rows(held)
    asked = {row["messages"][0]["content"] for row in kept}
    away = {row["messages"][0]["content"] for row in out}
    assert asked | away == {f"question {i}" for i in range(24)}
    assert not asked & away
    assert 2 <= len(away) <= 14
    source = write_jsonl(tmp_path / "reversed.jsonl", records[::-1])
    again, _ = read_conversations(str(source), None, None, 0.3)
    assert {c.rounds[0][-1]["content"] for c in again if c.held_out} == away


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [user("a"), assistant("x"), user("b")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"},
                           {"from": "human", "value": "b"}]},
        {"prompt": [user("a"), assistant("x"), user("b")]},
        {"prompt": [user("a"), assistant("x"), user("b")], "completion": "c"},
    ],
)  # fmt: skip
def test_every_layout_gives_the_same_rounds(tmp_path: Path, record: dict[str, Any]) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [record])
    ((conversation,), dropped) = read_conversations(str(source), "be kind", None, 0.0)
    system = {"role": "system", "content": "be kind"}
    assert conversation.rounds == [[system, user("a")], [user("b")]]
    assert conversation.answer_id(1) == "1/2"
    assert not dropped


def test_names_stay_apart_and_a_conversation_ends_before_a_tools_result(tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "21 degrees"}
    records = [
        {"id": "x", "messages": [{"role": "system", "content": "own"}, user("a")]},
        {"id": "x", "messages": [user("b"), assistant("call"), tool, user("c")]},
    ]
    source = write_jsonl(tmp_path / "p.jsonl", records)
    found, dropped = read_conversations(str(source), "be kind", None, 0.0)
    assert [conversation.name for conversation in found] == ["x", "x@2"]
    assert found[0].rounds[0][0]["content"] == "own"
    assert [turn["content"] for turn in found[1].rounds[0]] == ["be kind", "b"]
    assert len(found[1].rounds) == 1
    assert dropped == {"turns after a tool's result": 1}


def test_show_mask_marks_what_is_learnt(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "answers.jsonl"
    rows = [{"id": "r/2", "messages": [user("a"), {**assistant("b"), "weight": 0}, user("c"),
                                       assistant("good day")]}]  # fmt: skip
    write_jsonl(output, rows)
    with pytest.raises(ValueError, match="give --target"):
        run_prepare(PrepareOptions(output=output, show_mask=2))
    assert run_prepare(PrepareOptions(output=output, target=str(target), show_mask=2)) == 0
    shown = capsys.readouterr().out
    assert shown.count("⟦") == 1
    assert "⟦good day<|im_end|>⟧" in shown
    assert "--- r/2: 9 of " in shown


def test_training_takes_its_provenance_from_beside_the_data(tmp_path: Path, target: Path) -> None:
    prepare(tmp_path, target, PROMPTS)
    data = str(tmp_path / "answers.jsonl")
    said = provenance(data, "unknown")
    assert f"answers of {target}" in said
    assert "temperature 0.0" in said
    assert provenance(data, "written by hand") == "written by hand"
    assert provenance(str(tmp_path / "prompts.jsonl"), "unknown") == "unknown"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": ("127.0.0.1:3",)}, "not the address of a server"),
        ({"url": ("http://a",), "engine": "hf"}, "does not go with --engine hf"),
        ({"extra": ("--tp-size", "2")}, "needs --engine sglang"),
        ({"extra": ("stray",), "engine": "sglang"}, "'stray' is unexpected"),
        ({"concurrency": 4}, "one prompt at a time"),
        ({"held_out": 0.1}, "belong together"),
        ({"held_out_output": Path("h.jsonl")}, "belong together"),
        ({"output": Path("a.parquet")}, "must end in .jsonl"),
        ({"target": None}, "--target is missing"),
        ({"prompts": None}, "--prompts is missing"),
        ({"prompts": "none.jsonl"}, "does not exist"),
        ({"split": "test"}, "--split is for a hub data set"),
        ({"subset": "main"}, "--subset is for a hub data set"),
        ({"max_new_tokens": 4096}, "1 too long for the context of 512"),
    ],
)
def test_bad_options_are_one_sentence(
    tmp_path: Path, target: Path, options: dict[str, Any], words: str
) -> None:
    prompts = write_jsonl(tmp_path / "p.jsonl", PROMPTS[:1])
    given: dict[str, Any] = {
        "output": tmp_path / "a.jsonl", "prompts": str(prompts), "target": str(target), "quiet": True,
    }  # fmt: skip
    with pytest.raises(ValueError) as error:
        run_prepare(PrepareOptions(**{**given, **options}))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_split_and_subset_of_a_hub_data_set(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load_dataset(*words: Any, **named: Any) -> list[dict[str, Any]]:
        asked.append((*words, named["split"]))
        return [{"id": None, "prompt": "say 1", "completion": None}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    output = tmp_path / "answers.jsonl"
    chosen: dict[str, Any] = {"prompts": "some/questions", "split": "test", "subset": "main"}
    common: dict[str, Any] = {"max_new_tokens": NEW, "device": "cpu", "quiet": True}
    run_prepare(PrepareOptions(output=output, target=str(target), **chosen, **common))
    assert asked == [("some/questions", "main", "test")]
    assert [row["id"] for row in read_rows(output)] == ["1/1"]
    facts = json.loads(sidecar_path(output).read_text())
    assert {name: facts[name] for name in chosen} == chosen


def test_a_cut_answer_of_nothing_but_reasoning_is_kept(tmp_path: Path, target: Path) -> None:
    answer = Answer({"role": "assistant", "content": "", "reasoning_content": "two"}, "length", 2)

    async def ask(question: Question) -> Answer:
        return answer

    tokenizer = load_tokenizer(str(target), False)
    asking = Asking(tokenizer, [3], Sampling(0.0, 1.0, 0), NEW, True)
    conversation = Conversation("p", "f:1", [[user("a")]])
    with AnswerFile(tmp_path / "a.jsonl", {}, print) as file:
        tally = Tally(Counter(), 0)
        rows = Rows([conversation], [file], asking, tally, 512, 0, "s", everything=True)
        asyncio.run(rows.answer_all(ask, 1, Progress(notes_console(True), 1)))
    (row,) = read_rows(tmp_path / "a.jsonl")
    ids, mask = encode_row(tokenizer, parse_row(row, "f:1"), True, [3])
    learnt = tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
    assert learnt == "<think>\ntwo"


def test_ready_token_ids_are_no_prompt(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "p.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    with pytest.raises(ValueError, match=r"p\.jsonl:1 has 'input_ids'"):
        read_conversations(str(source), None, None, 0.0)
