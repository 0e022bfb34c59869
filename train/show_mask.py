"""Rows as the draft will see them: rendered through the template, what is learnt marked."""

from itertools import groupby, islice
from typing import Any

from domino_kit.chat_template import encode_row, split_row
from domino_kit.conversations import parse_row, read_records

MARKS = ("⟦", "⟧")


def marked(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    """The text of ``ids``, supervised runs between :data:`MARKS`.

    Decoded from the ids, run by run, so that it shows the tokens and not what they were made from.
    """
    parts = []
    for learnt, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        parts.append(f"{MARKS[0]}{text}{MARKS[1]}" if learnt else text)
    return "".join(parts)


def shown_rows(
    data: str, count: int, tokenizer: Any, thinking: bool | None, end_tokens: list[int]
) -> list[str]:
    """The first ``count`` rows of a data file, each with a heading.

    Raises ``ValueError`` naming the row that cannot be read or rendered.
    """
    found = []
    for where, record in islice(read_records(data), count):
        for row in split_row(tokenizer, parse_row(record, where), thinking):
            ids, mask = encode_row(tokenizer, row, thinking, end_tokens)
            cut = ", cut at the limit" if row.cut else ""
            heading = f"--- {row.row_id}: {sum(mask)} of {len(ids)} tokens are learnt{cut}"
            found.append(f"{heading}\n{marked(tokenizer, ids, mask)}")
    return found
