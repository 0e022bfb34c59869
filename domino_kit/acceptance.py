"""Accepted runs, the chain walk over a known answer, and every published "acceptance length".

A *run* is the number of leading drafts that one verify step accepts. Runs are compared between
replay, decode and serving, so one rule settles the last step of an answer: a run counts only
drafts that are part of the answer. Drafts beyond an end token or beyond ``max_new_tokens`` do not
count, even where an engine happened to verify them.
"""

from collections.abc import Sequence
from dataclasses import dataclass


def leading_run(proposals: Sequence[int], truth: Sequence[int]) -> int:
    """How many leading proposals equal the truth; proposals beyond its end never count."""
    run = 0
    for proposed, true in zip(proposals, truth, strict=False):
        if proposed != true:
            break
        run += 1
    return run


def chain_walk(runs: Sequence[int]) -> list[int]:
    """The runs that decoding takes, of what a step at each of consecutive anchors would accept.

    Decoding starts at the first answer token (it comes from the prefill) and jumps by run + 1; the
    last token is never an anchor, since nothing follows it.
    """
    taken = []
    place = 0
    while place < len(runs):
        taken.append(runs[place])
        place += runs[place] + 1
    return taken


def histogram(runs: Sequence[int], num_proposals: int) -> list[int]:
    """How many steps accepted 0, 1, … ``num_proposals`` drafts; ``ValueError`` for other runs."""
    counts = [0] * (num_proposals + 1)
    for run in runs:
        if not 0 <= run <= num_proposals:
            raise ValueError(f"a run of {run} accepted drafts is impossible with {num_proposals}.")
        counts[run] += 1
    return counts


def max_proposals(block_size: int, shift_label: bool, convention: str) -> int:
    """Most drafts a step under a convention.

    ``"engine"``: block size - 1 in both label modes (SGLang, SpecForge's loop). ``"authors"``: the
    authors' loop also serves the last row of a ``shift_label`` draft, so block size. Numbers under
    the two conventions are not comparable at the ceiling.
    """
    if convention not in ("engine", "authors"):
        raise ValueError(f"convention is {convention!r}; known are 'engine' and 'authors'.")
    return block_size if convention == "authors" and shift_label else block_size - 1


@dataclass(frozen=True)
class Acceptance:
    """Statistics of all verify steps of a run; ``counts`` is their :func:`histogram`."""

    counts: tuple[int, ...]

    @classmethod
    def of(cls, runs: Sequence[int], num_proposals: int) -> "Acceptance":
        """From single runs."""
        return cls(tuple(histogram(runs, num_proposals)))

    @property
    def num_proposals(self) -> int:
        """Drafts proposed in every step."""
        return len(self.counts) - 1

    @property
    def verify_steps(self) -> int:
        """Target passes after the prefill."""
        return sum(self.counts)

    @property
    def accepted_drafts(self) -> int:
        """Accepted drafts of all steps."""
        return sum(run * count for run, count in enumerate(self.counts))

    @property
    def accepted_drafts_per_step(self) -> float:
        """Mean run, **without** the bonus token (speculators' "EAL", counted, not multiplied)."""
        return self.accepted_drafts / self.verify_steps if self.verify_steps else 0.0

    @property
    def accept_length(self) -> float:
        """Mean run **with** the bonus token: the headline of the papers and of vLLM's log."""
        return self.accepted_drafts_per_step + 1.0 if self.verify_steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted by proposed drafts, no bonus (SGLang's ``spec_accept_rate``)."""
        proposed = self.verify_steps * self.num_proposals
        return self.accepted_drafts / proposed if proposed else 0.0

    @property
    def marginal(self) -> list[float]:
        """For each draft position 1 … n, the share of steps that accepted it."""
        steps = self.verify_steps
        return [
            sum(self.counts[position:]) / steps if steps else 0.0
            for position in range(1, len(self.counts))
        ]

    @property
    def conditional(self) -> list[float | None]:
        """For each draft position, its acceptance given all before were accepted; None if never."""
        reached = [sum(self.counts[position:]) for position in range(len(self.counts))]
        return [
            after / before if before else None
            for before, after in zip(reached, reached[1:], strict=False)
        ]


def per_response_accept_length(runs: Sequence[Sequence[int]]) -> float:
    """Mean over responses of each response's mean run + 1 (z-lab's benchmark prints this)."""
    means = [sum(run) / len(run) + 1 for run in runs if run]
    return sum(means) / len(means) if means else 0.0


def sglang_accept_length(completion_tokens: int, verify_steps: int) -> float:
    """SGLang's ``spec_accept_length``: completion tokens by verify steps.

    The first token comes from the prefill, so short answers read slightly high.
    """
    return completion_tokens / verify_steps if verify_steps else 0.0


def vllm_accept_length(accepted_drafts: int, num_drafts: int) -> float:
    """vLLM's log line: 1 + accepted draft tokens by drafts (= verify steps)."""
    return 1.0 + accepted_drafts / num_drafts if num_drafts else 0.0


def speculators_eal(position_accuracy: Sequence[float]) -> float:
    """speculators' expected accepted length, Σ_k Π_{i≤k} acc_i, **without** bonus.

    ``position_accuracy`` are conditional accuracies. Over more than one step the product of means
    is not the mean of products; :attr:`Acceptance.accepted_drafts_per_step` counts instead.
    """
    total, product = 0.0, 1.0
    for accuracy in position_accuracy:
        product *= accuracy
        total += product
    return total


def teacher_forced_accept_length(
    correct: Sequence[Sequence[bool]], valid: Sequence[Sequence[bool]]
) -> float:
    """The trainers' ``accept_len`` (SpecForge, Automodel): with bonus, under teacher forcing.

    Mean over blocks with a valid row of ``1 + Σ_k valid_k Π_{j≤k} (correct_j or not valid_j)``. It
    reads high: later rows see true tokens, and with ``shift_label`` its maximum is block size + 1.
    """
    lengths = []
    for row_correct, row_valid in zip(correct, valid, strict=True):
        if not any(row_valid):
            continue
        length, alive = 1, True
        for is_correct, is_valid in zip(row_correct, row_valid, strict=True):
            alive = alive and (is_correct or not is_valid)
            length += int(is_valid and alive)
        lengths.append(length)
    return sum(lengths) / len(lengths) if lengths else 0.0
