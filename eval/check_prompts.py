"""The prompts that `domino check` asks: given ones, or its own with the system prompt of training."""

from dataclasses import dataclass, field

from domino_kit.config import DraftConfig
from domino_kit.eval.prompt_set import Prompt, read_prompts
from domino_kit.manifest import Manifest
from domino_kit.target_contract import TargetFiles

OWN = (
    "Write a Python function that counts the words in a string, and explain how it works.",
    "A friend is moving to a town by the sea and has asked me for advice. The flat is on the third "
    "floor without a lift, the landlord wants three months of rent in advance, and the nearest "
    "station is a walk of forty minutes along the harbour. On the other hand the rent is low, the "
    "windows look out over the water, and there is a bakery on the ground floor that opens at five "
    "in the morning. My friend works from home on most days, owns a bicycle, has two cats, likes to "
    "cook for guests, and is afraid of heights. The contract runs for two years and can only be "
    "ended early by finding a new tenant. There is a second flat, smaller and closer to the centre, "
    "that costs a third more, has a lift, and may be left at three months' notice. Weigh both flats "
    "against each other, point by point, and say in the end which one you would take and why.",
)
DEFAULT_LIMIT = 4


@dataclass
class CheckPrompt:
    """One prompt, whether the user gave it, and its token ids once a tokenizer was there."""

    prompt: Prompt
    given: bool = False
    ids: list[int] = field(default_factory=list)


def choose_prompts(
    source: str | None, limit: int | None, manifest: Manifest | None
) -> list[CheckPrompt]:
    """Prompts of a file or benchmark, at most ``limit``; else our own.

    Ours are asked with the system prompt that most training rows had.
    """
    if source is not None:
        read = read_prompts(source, limit or DEFAULT_LIMIT)
        return [CheckPrompt(prompt, given=True) for prompt in read]
    trained = (manifest.data.get("system_prompts") if manifest else None) or [{"system": None}]
    system = trained[0]["system"]
    before = [] if system is None else [{"role": "system", "content": system}]
    texts = OWN[: limit or len(OWN)]
    return [
        CheckPrompt(Prompt(f"own-{place}", "own", [*before, {"role": "user", "content": text}]))
        for place, text in enumerate(texts)
    ]


def fitting_prompts(
    prompts: list[CheckPrompt], config: DraftConfig, files: TargetFiles, max_new_tokens: int
) -> list[CheckPrompt]:
    """The prompts whose answers fit in the positions; of our own, those that are too long are left.

    Raises ``ValueError`` without token ids, for a given prompt that is too long, or if none is left.
    """
    if files.tokenizer is None:
        raise ValueError(f"prompts cannot be written: {files.no_tokenizer}")
    limit = min(config.max_position_embeddings, files.text_config.max_position_embeddings)
    room = limit - max_new_tokens - config.block_size
    fit = [prompt for prompt in prompts if len(prompt.ids) <= room]
    if len(fit) < len(prompts) and (prompts[0].given or not fit):
        longest = max(len(prompt.ids) for prompt in prompts)
        raise ValueError(
            f"a prompt has {longest} tokens; with --max-new-tokens {max_new_tokens} and a block of "
            f"{config.block_size} there is room for {room} of the {limit} positions. Give shorter "
            "--prompts or lower --max-new-tokens."
        )
    return fit
