"""Regenerate the demo's data: the demo target's own greedy answers to one narrow family of prompts.

`python -m domino_kit.train.demo.generate` writes `train/demo/train.jsonl` and
`eval/prompts/demo_heldout.jsonl`. The workload is letters of resignation: the prompts differ in
the job, and no held-out job occurs in training.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from domino_kit.demo_target import ensure_demo_target

JOBS = """
accountant, acrobat, actor, actuary, animal trainer, anthropologist, app developer, archaeologist,
archivist, art dealer, art teacher, astronomer, auctioneer, auditor, author, baker, bank clerk,
barber, barista, bartender, beautician, beekeeper, bicycle courier, biologist, blacksmith, boat
builder, bookbinder, bookkeeper, bookseller, botanist, brewer, bricklayer, broadcaster, bus
driver, butcher, butler, cabinet maker, call centre agent, camera operator, caretaker, car
salesman, carpenter, cartographer, cartoonist, cashier, cellist, cheesemaker, chef, chemist,
chimney sweep, chiropractor, choir director, choreographer, civil engineer, cleaner,
climatologist, clockmaker, cobbler, comedian, composer, computer technician, concierge, conductor,
confectioner, conservator, copywriter, costume designer, counsellor, crane operator, customs
officer, dairy farmer, dance teacher, data analyst, database administrator, delivery driver,
dental hygienist, dentist, detective, dietitian, dishwasher, diver, doorman, drama teacher,
dressmaker, driving instructor, drummer, ecologist, economist, electrician, engraver,
entomologist, estate agent, event planner, farm worker, fashion designer, ferry captain, film
director, firefighter, fisherman, fitness trainer, flight attendant, florist, football coach,
forester, fundraiser, furniture restorer, game designer, gardener, geographer, geologist,
glassblower, goldsmith, graphic designer, greengrocer, guitar maker, gymnast, hairdresser, harbour
master, historian, horse trainer, hotel manager, house painter, housekeeper, hydrologist, ice
cream maker, illustrator, insurance agent, interior designer, interpreter, jeweller, journalist,
judge, juggler, kindergarten teacher, laboratory assistant, landscape architect, language teacher,
laundry worker, lawyer, lecturer, librarian, lifeguard, lighting technician, linguist, locksmith,
lorry driver, machinist, magician, make-up artist, marine biologist, market researcher, massage
therapist, mathematician, mechanic, medical secretary, meteorologist, midwife, milkman, miner,
model maker, mountain guide, museum guide, music teacher, musician, nanny, network engineer, news
presenter, night porter, novelist, nurse, nutritionist, office assistant, optician, orchestra
manager, organist, paediatrician, painter, paramedic, park ranger, pastry chef, pharmacist,
philosopher, photographer, physicist, physiotherapist, pianist, piano tuner, pilot, plasterer,
plumber, podiatrist, poet, police officer, politician, porter, postman, potter, primary school
teacher, printer, prison officer, project manager, proofreader, psychologist, public speaker,
puppeteer, radio producer, radiographer, railway engineer, receptionist, recruiter, reporter,
research assistant, restaurant manager, roofer, sailor, sales assistant, sculptor, seamstress,
secretary, security guard, shepherd, shop assistant, singer, ski instructor, social worker,
sociologist, software developer, solicitor, sommelier, sound engineer, speech therapist, stage
manager, statistician, steelworker, stonemason, street cleaner, surgeon, surveyor, swimming
teacher, tailor, tax adviser, taxi driver, tennis coach, test driver, theatre critic, tiler, tour
guide, toy maker, train driver, translator, travel agent, tree surgeon, tutor, upholsterer,
veterinarian, video editor, violinist, waiter, warehouse worker, watchmaker, weaver, web designer,
wedding planner, welder, window cleaner, wine merchant, woodcarver, writer, yoga teacher, youth
worker, zookeeper, zoologist
"""
# category -> what stands before the job
CATEGORIES = {"plain": "", "part-time": "part-time ", "senior": "senior "}
HELD_OUT_EVERY, HELD_OUT_FIRST, HELD_OUT_COUNT = 11, 6, 24
TRAINING_ROWS = 640
MAX_NEW_TOKENS = 96
BATCH_SIZE = 40


class Prompt(NamedTuple):
    """One user message and where it belongs."""

    id: str
    category: str
    text: str


class Answer(NamedTuple):
    """A greedy answer; `ids` includes the end token where the target gave one."""

    ids: list[int]
    text: str
    finish: str


def prompts() -> tuple[list[Prompt], list[Prompt]]:
    """The training prompts and the held-out ones; no job occurs in both."""
    jobs = [job.strip() for job in JOBS.replace("\n", " ").split(",")]
    if len(set(jobs)) != len(jobs):
        raise ValueError("a job occurs twice in the list")
    held_out_jobs = jobs[HELD_OUT_FIRST::HELD_OUT_EVERY][:HELD_OUT_COUNT]
    categories = list(CATEGORIES)
    training = [
        _prompt(job, category)
        for category in categories
        for job in jobs
        if job not in held_out_jobs
    ]
    held_out = [
        _prompt(job, categories[row % len(categories)]) for row, job in enumerate(held_out_jobs)
    ]
    return training, held_out


def _prompt(job: str, category: str) -> Prompt:
    role = CATEGORIES[category] + job
    article = "an" if role[0] in "aeio" or role == "upholsterer" else "a"
    identifier = f"{category}-{job.replace(' ', '-')}"
    return Prompt(
        identifier,
        category,
        f"Write a short letter of resignation from my job as {article} {role}.",
    )


def answer(model: Any, tokenizer: Any, texts: list[str]) -> list[Answer]:
    """Greedy answers of `model` to one batch of user messages, chat template as served."""
    conversations = [[{"role": "user", "content": text}] for text in texts]
    batch = tokenizer.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        return_tensors="pt",
        padding=True,
        return_dict=True,
    )
    rows = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answers = []
    for row in rows[:, batch["input_ids"].shape[1] :].tolist():
        stopped = tokenizer.eos_token_id in row
        ids = row[: row.index(tokenizer.eos_token_id) + 1] if stopped else row
        text = tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
        answers.append(Answer(ids, text, "stop" if stopped else "length"))
    return answers


def reproduces(tokenizer: Any, prompt: str, given: Answer) -> bool:
    """Whether the whole conversation tokenises to the prompt's ids, then the generated ids."""
    user = {"role": "user", "content": prompt}
    options = {"tokenize": True, "return_dict": False}
    start = tokenizer.apply_chat_template([user], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(
        [user, {"role": "assistant", "content": given.text}], **options
    )
    suffix = tokenizer.encode("\n", add_special_tokens=False)
    if given.finish == "length":
        suffix = [tokenizer.eos_token_id, *suffix]
    return list(whole) == [*start, *given.ids, *suffix]


def batches(training: list[Prompt], tokenizer: Any) -> Iterator[list[Prompt]]:
    """Batches of prompts of about equal length, in a fixed order."""
    ordered = sorted(training, key=lambda prompt: (len(tokenizer.encode(prompt.text)), prompt.id))
    for start in range(0, len(ordered), BATCH_SIZE):
        yield ordered[start : start + BATCH_SIZE]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line, through a temporary file and a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    temporary.replace(path)


def main(argv: list[str] | None = None) -> None:
    """Generate both files.

    Raises:
        ValueError, OSError: the demo target cannot be made, or a file cannot be written.
    """
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", type=Path, default=root / "train" / "demo" / "train.jsonl")
    parser.add_argument(
        "--heldout", type=Path, default=root / "eval" / "prompts" / "demo_heldout.jsonl"
    )
    options = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_demo_target()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    training, held_out = prompts()
    write_jsonl(
        options.heldout,
        (
            {"id": p.id, "category": p.category, "messages": [{"role": "user", "content": p.text}]}
            for p in held_out
        ),
    )
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    started = time.monotonic()
    for batch in batches(training, tokenizer):
        for prompt, given in zip(
            batch, answer(model, tokenizer, [p.text for p in batch]), strict=True
        ):
            counts["answers"] += 1
            if not reproduces(tokenizer, prompt.text, given):
                counts["dropped"] += 1
                continue
            counts[given.finish] += 1
            counts["tokens"] += len(given.ids)
            messages = [
                {"role": "user", "content": prompt.text},
                {"role": "assistant", "content": given.text},
            ]
            row = {"id": prompt.id, "category": prompt.category, "messages": messages}
            rows.append({**row, "finish": given.finish})
        rate = counts["tokens"] / (time.monotonic() - started)
        print(f"{counts['answers']}/{len(training)} answers, {rate:.0f} tokens/s", file=sys.stderr)
    random.Random(0).shuffle(rows)  # so that the first n rows are a fair sample for any n
    write_jsonl(options.train, rows[:TRAINING_ROWS])
    print(json.dumps(dict(counts)))


if __name__ == "__main__":
    main()
