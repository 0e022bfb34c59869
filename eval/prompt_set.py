"""Prompts to measure on: a local file, or a named benchmark from the hub or from a local copy."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_kit.conversations import check_file, is_file, parse_row, read_records


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lives on the hub and which fields make a prompt."""

    hub_name: str
    subset: str | None
    split: str
    fields: tuple[str, ...]
    category: str | None = None


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark("openai/gsm8k", "main", "test", ("question",)),
    "humaneval": Benchmark("openai/openai_humaneval", None, "test", ("prompt",)),
    "mt-bench": Benchmark("HuggingFaceH4/mt_bench_prompts", None, "train", ("prompt",), "category"),
    "alpaca": Benchmark("tatsu-lab/alpaca", None, "train", ("instruction", "input")),
    "math500": Benchmark("HuggingFaceH4/MATH-500", None, "test", ("problem",), "subject"),
}


@dataclass(frozen=True)
class Prompt:
    """One prompt as chat messages."""

    prompt_id: str
    category: str
    messages: list[dict[str, Any]]


def read_prompts(source: str, limit: int | None) -> list[Prompt]:
    """Prompts from ``FILE``, ``BENCHMARK`` (the hub) or ``BENCHMARK=FILE`` (a local copy of it).

    A conversation's last assistant turns are left out: they are what will be generated. Raises
    ``ValueError`` naming the file and line, or the known benchmarks.
    """
    check_source(source)
    name, _, file = source.partition("=")
    prompts = _benchmark(name, file or None) if name in BENCHMARKS else _conversations(source)
    found = []
    for prompt in prompts:
        found.append(prompt)
        if limit is not None and len(found) == limit:
            break
    if not found:
        raise ValueError(f"prompts {source!r} holds no prompts.")
    return found


def check_source(source: str) -> None:
    """Raise ``ValueError`` for prompts that are neither a benchmark nor data, or a file not there."""
    name, _, file = source.partition("=")
    data = file if name in BENCHMARKS else source
    if name not in BENCHMARKS and not (Path(source).expanduser().exists() or Path(source).suffix):
        raise ValueError(
            f"prompts {source!r} is neither a file nor a benchmark; known benchmarks are "
            f"{', '.join(BENCHMARKS)}."
        )
    if data and is_file(data):
        check_file(Path(data).expanduser())


def _benchmark(name: str, file: str | None) -> Iterable[Prompt]:
    bench = BENCHMARKS[name]
    records = read_records(file or bench.hub_name, bench.split, bench.subset)
    for number, (where, record) in enumerate(records, start=1):
        parts = [_text(record, field, where) for field in bench.fields]
        text = "\n".join(part for part in parts if part)
        if not text:
            raise ValueError(f"{where} has no {bench.fields[0]!r}, which {name} prompts need.")
        category = str(record.get(bench.category, name)) if bench.category else name
        yield Prompt(f"{name}-{number}", category, [{"role": "user", "content": text}])


def _text(record: Any, field: str, where: str) -> str:
    """A prompt field; MT-Bench holds a list of turns, of which the first is asked."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not an object with fields.")
    value = record.get(field) or ""
    if isinstance(value, list):
        value = value[0] if value else ""
    return str(value)


def _conversations(source: str) -> Iterable[Prompt]:
    for number, (where, record) in enumerate(read_records(source), start=1):
        if isinstance(record, dict) and isinstance(record.get("prompt"), str):
            record = {"completion": "", **record}
        row = parse_row(record, where)
        messages = list(row.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise ValueError(
                f"{where} has no prompt: it needs a user turn (input_ids are not read)."
            )
        prompt_id = str(record.get("id", number))
        yield Prompt(prompt_id, row.category or "all", messages)
