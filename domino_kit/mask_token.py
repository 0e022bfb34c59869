"""Which token stands for "not drafted yet": an explicit id or a documented choice, never a guess."""

from typing import Any

# As published drafts use them: for Qwen3 a row of the padded embedding that no token uses, for
# Qwen3.5 the special token <|audio_start|>, which text never has.
KNOWN_FAMILIES: dict[str, int] = {
    "qwen3": 151669,
    "qwen3_moe": 151669,
    "qwen3_5": 248070,
    "qwen3_5_text": 248070,
    "qwen3_5_moe": 248070,
    "qwen3_5_moe_text": 248070,
}


def resolve_mask_token(
    explicit: int | None, tokenizer: Any, model_type: str, vocab_size: int, end_tokens: list[int]
) -> tuple[int, str]:
    """The mask token id and a word on where it came from.

    ``vocab_size`` counts the rows of the target's embedding: the mask must be one of them, since
    its vector is the target's and is not stored with the draft. Raises ``ValueError`` if sources
    disagree, if the id is out of range, or if it is the padding or an end token.
    """
    own = getattr(tokenizer, "mask_token_id", None)
    if explicit is not None:
        if own is not None and own != explicit:
            raise ValueError(
                f"draft.mask_token_id is {explicit}, but the tokenizer has a mask token with id "
                f"{own}; an engine would take the tokenizer's. Set draft.mask_token_id={own}."
            )
        found, source = explicit, "recipe"
    elif own is not None:
        found, source = own, "tokenizer"
    elif model_type in KNOWN_FAMILIES and KNOWN_FAMILIES[model_type] < vocab_size:
        found, source = KNOWN_FAMILIES[model_type], f"published choice for {model_type}"
        if found < len(tokenizer) and not _is_special(tokenizer, found):
            raise ValueError(
                f"the published mask id {found} for {model_type} is a real token of this tokenizer; "
                "set draft.mask_token_id to an id that the target never emits."
            )
    else:
        spare = f", such as {len(tokenizer)}" if len(tokenizer) < vocab_size else ""
        raise ValueError(
            f"draft.mask_token_id is not set and {model_type!r} has no published choice; set it to "
            f"a token that the target never emits{spare}, below {vocab_size}."
        )
    return _check(found, source, tokenizer, vocab_size, end_tokens), source


def _is_special(tokenizer: Any, token: int) -> bool:
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(token)
    return added is not None and bool(added.special)


def _check(found: int, source: str, tokenizer: Any, vocab_size: int, end_tokens: list[int]) -> int:
    if not 0 <= found < vocab_size:
        raise ValueError(
            f"the mask token id {found} (from the {source}) is not a row of the target's embedding "
            f"(0 to {vocab_size - 1}); rows added by resizing are not served. Choose a spare row."
        )
    if found == tokenizer.pad_token_id or found in end_tokens:
        kind = "an end token" if found in end_tokens else "the padding token"
        raise ValueError(
            f"the mask token id {found} (from the {source}) is {kind}; choose a token that never "
            "occurs in text."
        )
    return found
