"""What `domino prepare` asks: the user turns of conversations, with stable names and no repeats."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from domino_kit.conversations import parse_row, read_records


@dataclass(frozen=True)
class Conversation:
    """The user's side of a conversation.

    ``rounds`` are the turns to add before each answer: the last one of a round is the user's.
    ``held_out`` says that its answers are kept from training.
    """

    name: str
    where: str
    rounds: list[list[dict[str, Any]]]
    tools: list[Any] | None = None
    held_out: bool = False

    def answer_id(self, place: int) -> str:
        """The id of the row of its answer number ``place``, from 0."""
        return f"{self.name}/{place + 1}"


def read_conversations(
    source: str,
    system: str | None,
    limit: int | None,
    held_out: float,
    split: str = "train",
    subset: str | None = None,
) -> tuple[list[Conversation], Counter[str]]:
    """The conversations of a file or hub data set, and why others were dropped.

    ``system`` is for conversations without a system turn of their own; ``limit`` counts what is
    kept; ``split`` and ``subset`` are of a hub data set. Raises ``ValueError`` naming file, line and
    field for what is not a conversation.
    """
    found: list[Conversation] = []
    dropped: Counter[str] = Counter()
    names: set[str] = set()
    prompts: set[str] = set()
    for number, (where, record) in enumerate(read_records(source, split, subset), start=1):
        if limit is not None and len(found) == limit:
            break
        rounds, tools, cut = _rounds(record, where, system)
        if cut:
            dropped["turns after a tool's result"] += 1
        if not rounds or not all(each[-1]["content"].strip() for each in rounds):
            dropped["empty"] += 1
            continue
        key = _key([rounds, tools], where)
        if key in prompts:
            dropped["duplicate"] += 1
            continue
        prompts.add(key)
        name = str(record.get("id", number))
        # The same id twice, as in files put together: the place in the file tells them apart.
        name = f"{name}@{number}" if name in names else name
        names.add(name)
        kept_out = _share(rounds[0][-1]["content"]) < held_out
        found.append(Conversation(name, where, rounds, tools, kept_out))
    return found, dropped


def _rounds(
    record: Any, where: str, system: str | None
) -> tuple[list[list[dict[str, Any]]], list[Any] | None, bool]:
    """The user's turns round by round, the tools, and whether turns were left out.

    What a tool answered belongs to a call that the target may not repeat, so a conversation ends
    before it.
    """
    if isinstance(record, dict) and "prompt" in record and "completion" not in record:
        record = {"completion": "", **record}
    row = parse_row(record, where)
    if row.input_ids is not None:
        raise ValueError(
            f"{where} has 'input_ids', from which no turns can be read; prompts need 'messages', "
            "'conversations' or 'prompt' with text."
        )
    turns = [dict(turn) for turn in row.messages if turn["role"] != "assistant"]
    if system is not None and not any(turn["role"] == "system" for turn in turns):
        turns.insert(0, {"role": "system", "content": system})
    rounds: list[list[dict[str, Any]]] = []
    waiting: list[dict[str, Any]] = []
    for turn in turns:
        if turn["role"] == "tool":
            return rounds, row.tools, True
        waiting.append(turn)
        if turn["role"] == "user":
            rounds.append(waiting)
            waiting = []
    return rounds, row.tools, False


def _key(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has the character {error.object[error.start]!r}, half of a surrogate pair, "
            "which is no text; repair or drop the row."
        ) from None
    return hashlib.sha256(text).hexdigest()


def _share(text: str) -> float:
    """A number from 0 to 1 that depends on the first question alone.

    So a prompt is on the same side in every run, and beside whatever other prompts.
    """
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
