"""The mask token: explicit or a documented choice, a conflict is an error, never pad or end."""

from types import SimpleNamespace
from typing import Any

import pytest

from domino_kit.mask_token import resolve_mask_token


class Tokenizer(SimpleNamespace):
    """Just what the choice looks at."""

    def __len__(self) -> int:
        return int(self.size)


def tokenizer(**fields: Any) -> Tokenizer:
    return Tokenizer(**{"size": 64, "pad_token_id": 5, "mask_token_id": None, **fields})


def test_an_explicit_spare_row_is_taken() -> None:
    assert resolve_mask_token(70, tokenizer(), "llama", 72, [6]) == (70, "recipe")


def test_the_tokenizers_own_mask_token_is_taken() -> None:
    assert resolve_mask_token(None, tokenizer(mask_token_id=9), "llama", 72, [6])[0] == 9


def test_known_families_have_a_published_choice() -> None:
    qwen = tokenizer(size=151669, pad_token_id=151643)
    found, source = resolve_mask_token(None, qwen, "qwen3", 151936, [151645])
    assert found == 151669
    assert "qwen3" in source


@pytest.mark.parametrize("special", [True, False])
def test_the_published_choice_may_be_a_special_token_but_no_other(special: bool) -> None:
    added = {248070: SimpleNamespace(special=special)}  # <|audio_start|> in Qwen3.5's tokenizer
    qwen = tokenizer(size=248077, pad_token_id=248044, added_tokens_decoder=added)
    if special:
        found = resolve_mask_token(None, qwen, "qwen3_5_text", 248320, [248046])
        assert found == (248070, "published choice for qwen3_5_text")
    else:
        with pytest.raises(ValueError, match=r"248070.*real token"):
            resolve_mask_token(None, qwen, "qwen3_5_text", 248320, [248046])


@pytest.mark.parametrize(
    ("explicit", "fields", "family", "words"),
    [
        (None, {}, "llama", "not set.*such as 64"),
        (6, {}, "llama", "is an end token"),
        (5, {}, "llama", "is the padding token"),
        (72, {}, "llama", "not a row"),
        (-1, {}, "llama", "not a row"),
        (70, {"mask_token_id": 71}, "llama", "70.*71"),
        (None, {"size": 151670}, "qwen3", "151669.*real token"),
    ],
)
def test_everything_else_is_refused(
    explicit: int | None, fields: dict[str, Any], family: str, words: str
) -> None:
    rows = 151936 if family == "qwen3" else 72
    with pytest.raises(ValueError, match=words):
        resolve_mask_token(explicit, tokenizer(**fields), family, rows, [6])
