"""The contract: facts fixed when a draft is trained, compared wherever it is loaded. Here: findings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]

FACTS: dict[str, str] = {
    # the draft's own files
    "config": "config.json is readable and says nothing that would be served otherwise",
    "manifest": "domino_manifest.json is readable",
    "gate": "training's own check of this checkpoint",
    "rope_spelling": "the RoPE base stands where every reader looks for it",
    "tensors": "the weights have just the names and shapes that config.json implies",
    "weights": "the weights are those that were trained",
    "mask_token_id": "the token that stands for 'not drafted yet'",
    "target_layer_ids": "the target layers that the draft reads, in their order",
    "shift_label": "which token a row predicts",
    "block_size": "rows of a block",
    "rope_theta": "base of the rotary positions",
    "draft_shape": "every other field of config.json",
    # the target's files
    "target_config": "what the target computes, by its config",
    "target_weights": "the target's weights, by a few rows of every tensor",
    "embedding": "the target's embedding",
    "head": "the target's output head",
    "tokenizer": "the tokenizer's vocabulary",
    "mask_special": "the mask is a token that never occurs in text",
    "last_layer": "how the last layer's feature is taken",
    "context_length": "the longest context that the draft was made for",
    # how prompts are written
    "chat_template": "the chat template",
    "thinking": "the thinking mode",
    "system_prompt": "the system prompt",
    # a running server
    "layer_ids": "layers that the server captures",
    "label_mode": "label mode in the server",
    "candidate_pool": "tokens that the served head may propose",
    "rope_table": "rotary tables in the server against float32",
    "attention": "the draft's attention in the server: full, in both directions",
    "draft_weights": "the draft's weights in the server against its files",
    "draft_quantization": "the draft is served unquantised",
    "draft_dtype": "draft and target are served in the same dtype",
    "head_weights": "the target's output head in the server",
    "head_active": "the Domino head is used",
}
"""Every fact that can be found different, in words; the names are what ``--allow`` takes."""

PROMPT_FACTS = ("chat_template", "thinking", "system_prompt")
"""How prompts are written: another way still decodes exactly, but acceptance drops."""

FATAL = ("config", "tensors")
"""Without these a draft cannot be loaded, so there is nothing to allow."""


@dataclass(frozen=True)
class Finding:
    """One fact that is not as in training: what was found, what was fixed, and what to do."""

    name: str
    severity: Severity
    message: str


@dataclass
class Contract:
    """What a comparison found, what it looked at, and what it could not (``"name: why"``)."""

    findings: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """Findings that stop; first those that cannot be allowed."""
        found = [finding for finding in self.findings if finding.severity == "error"]
        return sorted(found, key=lambda finding: finding.name not in FATAL)

    @property
    def blocking(self) -> list[Finding]:
        """Errors after which comparing stages says nothing new.

        A failed gate is not one: the stages say what it failed at.
        """
        return [finding for finding in self.errors if finding.name != "gate"]

    @property
    def warnings(self) -> list[Finding]:
        """Findings that are only said."""
        return [finding for finding in self.findings if finding.severity == "warning"]

    def error(self, name: str, message: str) -> None:
        """Note a difference that stops."""
        self._note(Finding(name, "error", message))

    def warning(self, name: str, message: str) -> None:
        """Note a difference that is only said."""
        self._note(Finding(name, "warning", message))

    def _note(self, finding: Finding) -> None:
        assert finding.name in FACTS, finding.name
        self.findings.append(finding)

    def looked_at(self, *names: str) -> None:
        """Note facts as compared."""
        self.checked += [name for name in names if name not in self.checked]

    def could_not(self, name: str, why: str) -> None:
        """Note a fact that could not be compared."""
        assert name in FACTS, name
        self.unchecked.append(f"{name}: {why}")

    def allow(self, names: Iterable[str]) -> None:
        """Turn errors of these names into warnings, and remember that."""
        for place, finding in enumerate(self.findings):
            if finding.severity == "error" and finding.name in names:
                self.findings[place] = Finding(finding.name, "warning", finding.message)
                self.allowed += [finding.name] if finding.name not in self.allowed else []

    def only_warn(self, names: Iterable[str]) -> None:
        """Turn errors of these names into warnings: for a use that they do not spoil."""
        self.findings = [
            Finding(each.name, "warning", each.message) if each.name in names else each
            for each in self.findings
        ]

    def make_errors(self, names: Iterable[str]) -> None:
        """Turn warnings of these names into errors, except where they were allowed."""
        self.findings = [
            Finding(each.name, "error", each.message)
            if each.name in names and each.name not in self.allowed
            else each
            for each in self.findings
        ]

    def stop(self) -> None:
        """Raise ``ValueError`` with the first error, if there is one, and how to allow it."""
        for finding in self.errors:
            way = "" if finding.name in FATAL else f" (or accept it with --allow {finding.name})"
            raise ValueError(f"{finding.message}{way}")

    def to_json(self) -> dict[str, Any]:
        """For a report."""
        return {
            "findings": [vars(finding) for finding in self.findings],
            "checked": self.checked,
            "unchecked": self.unchecked,
            "allowed": self.allowed,
        }


def check_allowed(names: Sequence[str]) -> tuple[str, ...]:
    """The names given to ``--allow``; raises ``ValueError`` for one that is no fact."""
    for name in names:
        if name not in FACTS or name in FATAL:
            known = ", ".join(sorted(set(FACTS) - set(FATAL)))
            raise ValueError(f"--allow {name!r} names no fact that can be allowed; known: {known}.")
    return tuple(dict.fromkeys(names))
