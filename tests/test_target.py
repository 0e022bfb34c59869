"""The frozen target: its features, its two ends, its cached steps, and the targets it refuses."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from domino_kit import decoding
from domino_kit.target import Target, check_model_folder, default_layer_ids, end_token_ids
from tests.tiny import FAMILIES, plain_greedy, tiny_model, tiny_target

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR_SIZES = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 2,
}


def ids_and_mask(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random right-padded token ids and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 32, (len(lengths), max(lengths)), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        ids[row, length:] = 0
    return ids, mask


# -- features and the two ends ---------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_hidden_states(family: str) -> None:
    """Feature i is transformers' hidden_states[i + 1], in the order asked for."""
    target = tiny_target(family, layer_ids=(2, 0, 1))
    ids, mask = ids_and_mask([7, 7])
    states = target.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    expected = torch.cat([states.hidden_states[i + 1] for i in (2, 0, 1)], dim=-1)
    torch.testing.assert_close(target.encode(ids, mask).features, expected)


def test_feature_i_is_the_output_of_layer_i() -> None:
    """In a target whose layer i adds the constant i + 1, features are the running sums."""
    model = tiny_model("qwen3")

    class Adder(nn.Module):
        def __init__(self, amount: float) -> None:
            super().__init__()
            self.amount = amount

        def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return hidden_states + self.amount

    model.model.layers = nn.ModuleList(Adder(i + 1.0) for i in range(4))
    target = Target(model, [0, 1, 3], allow_last_layer=True)
    ids, mask = ids_and_mask([3])
    added = target.encode(ids, mask).features.view(1, 3, 3, 32) - target.embed(ids)[:, :, None]
    torch.testing.assert_close(added[0, 0, :, 0], torch.tensor([1.0, 3.0, 10.0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_last_layer_is_taken_before_the_norm(family: str) -> None:
    """The last layer's feature is pre-norm: the final norm turns it into the last hidden row."""
    target = tiny_target(family, layer_ids=(3,), allow_last_layer=True)
    outcome = target.encode(*ids_and_mask([6]))
    torch.testing.assert_close(target.decoder.norm(outcome.features), outcome.hidden)
    assert not torch.allclose(outcome.features, outcome.hidden)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head(family: str, tied: bool) -> None:
    """The head on the last hidden rows gives the model's logits, tied or not."""
    target = tiny_target(family, tie_word_embeddings=tied)
    ids, mask = ids_and_mask([6, 4])
    shared = target.head.weight.data_ptr() == target.embedding.weight.data_ptr()
    assert shared == tied
    logits = target.model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(target.logits(target.encode(ids, mask).hidden), logits)
    assert torch.equal(target.embed(ids), target.embedding.weight[ids])


def test_target_is_frozen() -> None:
    """Evaluation mode, no gradients anywhere, and hooks are gone after a pass."""
    target = tiny_target()
    outcome = target.encode(*ids_and_mask([5]))
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not outcome.features.requires_grad
    assert not any(layer._forward_hooks for layer in target.layers)


def test_facts() -> None:
    """Vocabulary counts the head's rows, also spare ones."""
    target = tiny_target(vocab=40)
    assert (target.vocab_size, target.hidden_size) == (40, 32)
    assert target.device == torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_short_row_is_the_same_alone_and_padded(family: str) -> None:
    """Padding on the right changes nothing in a shorter text."""
    target = tiny_target(family)
    ids, mask = ids_and_mask([5, 12, 9])
    together = target.encode(ids, mask)
    alone = target.encode(ids[:1, :5], mask[:1, :5])
    torch.testing.assert_close(together.features[0, :5], alone.features[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together.hidden[0, :5], alone.hidden[0], atol=1e-5, rtol=1e-4)


def test_fully_padded_row_is_finite() -> None:
    """A row of padding only gives finite features, so it cannot poison a batch."""
    target = tiny_target()
    ids, mask = ids_and_mask([6, 6])
    mask[1] = 0
    assert bool(target.encode(ids, mask).features.isfinite().all())


# -- layer ids -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer_ids", "words"),
    [
        ([0, 0], ["distinct"]),
        ([], ["not empty"]),
        ([0, 4], ["4", "out of range", "0 to 3"]),
        ([-1], ["-1", "out of range"]),
        ([1, 3], ["last layer 3", "allow_last_layer"]),
    ],
)
def test_layer_ids_refused(layer_ids: list[int], words: list[str]) -> None:
    """Duplicate, missing, out-of-range and last layers are refused in words."""
    with pytest.raises(ValueError) as error:
        tiny_target(layer_ids=tuple(layer_ids))
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 1, [18]),
        (6, 2, [1, 3]),
        (5, 2, [1, 2]),
    ],
)
def test_default_layer_ids(layers: int, count: int, expected: list[int]) -> None:
    """The published spread, from 1 to T - 3."""
    assert default_layer_ids(layers, count) == expected


@pytest.mark.parametrize(("layers", "count"), [(4, 5), (4, 2), (6, 5), (2, 2), (3, 2)])
def test_default_layer_ids_refused(layers: int, count: int) -> None:
    """A shallow target, where the formula repeats or leaves the range, is refused."""
    with pytest.raises(ValueError, match=r"target_layer_ids"):
        default_layer_ids(layers, count)


# -- cached steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_steps_equal_one_pass(family: str, seed: int) -> None:
    """Any split of a text into steps, with rejected tokens in between, equals the whole pass."""
    rng = random.Random(seed)
    target = tiny_target(family)
    ids, mask = ids_and_mask([16, 16], seed)
    whole = target.encode(ids, mask)
    cache = target.new_cache(24)
    place = 0
    while place < 16:
        size = rng.randint(1, 16 - place)
        junk = torch.randint(2, 32, (2, size + 3))
        target.step(junk, torch.arange(place, place + size + 3).expand(2, -1), cache)
        span = slice(place, place + size)
        outcome = target.step(ids[:, span], torch.arange(16)[span].expand(2, -1), cache)
        torch.testing.assert_close(outcome.hidden, whole.hidden[:, span], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(outcome.features, whole.features[:, span], atol=1e-5, rtol=1e-4)
        place += size


def test_rows_at_different_positions() -> None:
    """Rows of one batch may stand at different positions of different texts."""
    target = tiny_target()
    ids, mask = ids_and_mask([14, 9])
    whole = target.encode(ids, mask)
    cache = target.new_cache(20)
    target.step(ids[:, :9], torch.arange(9).expand(2, -1), cache)
    starts = [9, 5]
    positions = torch.stack([torch.arange(start, start + 4) for start in starts])
    outcome = target.step(ids.gather(1, positions), positions, cache)
    for row, start in enumerate(starts):
        expected = whole.hidden[row, start : start + 4]
        torch.testing.assert_close(outcome.hidden[row], expected, atol=1e-5, rtol=1e-4)


def test_select_keeps_the_chosen_rows() -> None:
    """After dropping rows the cache continues the remaining texts."""
    target = tiny_target()
    ids, mask = ids_and_mask([10, 10, 10])
    whole = target.encode(ids, mask)
    cache = target.new_cache(12)
    target.step(ids[:, :6], torch.arange(6).expand(3, -1), cache)
    rows = torch.tensor([2, 0])
    cache.select(rows)
    outcome = target.step(ids[rows, 6:], torch.arange(6, 10).expand(2, -1), cache)
    torch.testing.assert_close(outcome.hidden, whole.hidden[rows, 6:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_steps_do_not_depend_on_the_attention_implementation(implementation: str) -> None:
    """Steps equal the whole pass whatever attention the model was built with."""
    target = tiny_target(attn_implementation=implementation)
    ids, mask = ids_and_mask([9])
    whole = target.encode(ids, mask)
    stepped = target.step(ids, torch.arange(9)[None], target.new_cache(9))
    torch.testing.assert_close(stepped.hidden, whole.hidden, atol=1e-5, rtol=1e-4)


# -- refused targets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    ],
)
def test_sliding_targets_cannot_decode(family: str, fields: dict[str, Any]) -> None:
    """A target with windowed attention gets no cache, whichever field says so."""
    with pytest.raises(ValueError, match=r"slid"):
        tiny_target(family, **fields).new_cache(16)


def test_sliding_target_without_layer_types_cannot_decode() -> None:
    """Mistral names its window without layer types; it must not be decoded without its window."""
    model = MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=4))
    with pytest.raises(ValueError, match=r"slid"):
        Target(model, [0, 2]).new_cache(16)


def test_mistral_without_a_window_decodes() -> None:
    """The same family with full attention is an ordinary target."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=None))
    answer = decoding.generate(Target(model, [0, 2]), None, [[5, 6, 7]], 12, [])[0]
    assert answer.tokens == plain_greedy(model, [5, 6, 7], 12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.0625),
        ("logits_scaling", 8.0),
        ("embedding_multiplier", 12.0),
    ],
)
def test_scaled_targets_refused(field: str, value: float) -> None:
    """A config field that scales or caps embeddings or logits is named."""
    model = tiny_model()
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=rf"{field}={value}"):
        Target(model, [0, 2])


def test_granite_scaling_refused() -> None:
    """A real family with multipliers is refused, and accepted where they are neutral."""
    scaled = GraniteConfig(**SIZES, embedding_multiplier=12.0, logits_scaling=8.0)
    with pytest.raises(ValueError, match="are not supported"):
        Target(GraniteForCausalLM(scaled), [0, 2])
    Target(GraniteForCausalLM(GraniteConfig(**SIZES)), [0, 2])


def test_embedding_that_scales_itself_refused() -> None:
    """Gemma scales inside its embedding module; an engine would feed the draft other vectors."""
    with pytest.raises(ValueError, match="embedding"):
        Target(GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8)), [0, 2])


def test_biased_head_refused() -> None:
    """An output head with bias is refused."""
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    with pytest.raises(ValueError, match="bias"):
        Target(PhiForCausalLM(PhiConfig(**sizes)), [0, 2])


def test_unknown_structure_refused() -> None:
    """A model without the usual accessors is refused by class name."""
    config = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    with pytest.raises(ValueError, match="GPT2LMHeadModel"):
        Target(GPT2LMHeadModel(config), [0])


# -- hybrid and multimodal targets -----------------------------------------------------------


def hybrid_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**SIZES, **LINEAR_SIZES, head_dim=8)
    assert "linear_attention" in config.layer_types
    return Qwen3_5ForCausalLM(config).eval()


def test_hybrid_target_encodes() -> None:
    """Qwen3.5's features and logits are those of the model."""
    target = Target(hybrid_model(), [0, 2])
    ids, mask = ids_and_mask([6])
    expected = target.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    outcome = target.encode(ids, mask)
    states = [expected.hidden_states[i + 1] for i in (0, 2)]
    torch.testing.assert_close(outcome.features, torch.cat(states, dim=-1))
    torch.testing.assert_close(target.logits(outcome.hidden), expected.logits)


def test_hybrid_target_padding() -> None:
    """Recurrent layers do not carry padding on the right into a shorter text."""
    target = Target(hybrid_model(), [0, 2])
    ids, mask = ids_and_mask([5, 12])
    together, alone = target.encode(ids, mask), target.encode(ids[:1, :5], mask[:1, :5])
    torch.testing.assert_close(together.features[0, :5], alone.features[0], atol=1e-5, rtol=1e-4)


def test_hybrid_target_cannot_decode() -> None:
    """Recurrent state cannot take back a rejected token, so decoding is refused by layer type."""
    with pytest.raises(ValueError, match="linear_attention"):
        Target(hybrid_model(), [0, 2]).new_cache(16)
    with pytest.raises(ValueError, match="linear_attention"):
        decoding.generate(Target(hybrid_model(), [0, 2]), None, [[5, 6]], 4, [])


VISION = {"hidden_size": 16, "intermediate_size": 16}


def qwen3_vl() -> Any:
    vision = {
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [],
        **VISION,
    }
    text = {**SIZES, "head_dim": 8}
    config = Qwen3VLConfig(text_config=text, vision_config=vision)
    return Qwen3VLForConditionalGeneration(config)


def llava() -> Any:
    vision = CLIPVisionConfig(
        num_hidden_layers=1, num_attention_heads=2, image_size=14, patch_size=14, **VISION
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=LlamaConfig(**SIZES), vision_config=vision)
    )


@pytest.mark.parametrize("build", [qwen3_vl, llava])
def test_multimodal_wrapper(build: Any) -> None:
    """A wrapper is used through its text model: features, logits and decoding of plain text."""
    torch.manual_seed(0)
    model = build().eval()
    target = Target(model, [0, 2])
    assert target.hidden_size == 32 and len(target.layers) == 4
    ids, mask = ids_and_mask([7])
    expected = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    outcome = target.encode(ids, mask)
    states = [expected.hidden_states[i + 1] for i in (0, 2)]
    torch.testing.assert_close(outcome.features, torch.cat(states, dim=-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(target.logits(outcome.hidden), expected.logits, atol=1e-4, rtol=1e-4)
    answer = decoding.generate(target, None, [[5, 6, 7]], 10, [])[0]
    assert answer.tokens == plain_greedy(model, [5, 6, 7], 10)


# -- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_missing_folder_refused(path: str) -> None:
    """A local path without config.json is named, with what is expected there."""
    with pytest.raises(ValueError, match=r"config\.json"):
        check_model_folder(path)


def test_hub_names_pass() -> None:
    """A hub name is not taken for a path."""
    check_model_folder("Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [([7, 5, 7], 3, [5, 7]), (4, 3, [4]), (None, 3, [3]), (None, None, []), (0, 3, [0])],
)
def test_end_token_ids(generation: Any, own: int | None, expected: list[int]) -> None:
    """End tokens come from the generation config, else from the tokenizer; 0 is a token too."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation))
    assert end_token_ids(model, SimpleNamespace(eos_token_id=own)) == expected
