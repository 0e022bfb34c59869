"""A byte-level tokenizer with chat templates in the styles that targets use, and a saved target."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_model

SPECIAL = ("<|pad|>", "<|mask|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# As Qwen3: reasoning is shown for the last answer only, an empty think block is inserted there
# when it has none, and the generation prompt supplies one when thinking is off.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set reasoning = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}"
    "{{ content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def tiny_tokenizer(template: str | None = PLAIN) -> Any:
    """256 bytes and the special tokens; ``<|im_end|>`` ends a turn."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*SPECIAL, *letters])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def save_target(
    folder: Path, *, attention: float = 1.0, template: str = PLAIN, **fields: Any
) -> Path:
    """A tiny random chat model as a Hugging Face folder; its mask is id 1, its end token id 3.

    ``attention`` scales what attention adds: near 0 the next token follows from the last one, and
    a draft can learn that in seconds.
    """
    model = tiny_model(**{"vocab": len(SPECIAL) + 256, "tie_word_embeddings": True, **fields})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= attention
    model.generation_config.eos_token_id = 3
    model.save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_rows(count: int) -> list[dict[str, Any]]:
    """Short conversations."""
    return [
        {
            "id": f"row-{i}",
            "messages": [
                {"role": "user", "content": f"say {i % 7}"},
                {"role": "assistant", "content": f"here is {i % 7}, and {i % 5}."},
            ],
        }
        for i in range(count)
    ]
