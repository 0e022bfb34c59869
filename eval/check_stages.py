"""The stage traces of `domino check`: recorded in training, and from graph, replay, decode, server."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from domino_kit.contract import Contract, Finding
from domino_kit.decoding import Answer
from domino_kit.eval.engine import base_url, own_server
from domino_kit.eval.served import ServedAnswer, ask_all
from domino_kit.manifest import TRACE_NAME
from domino_kit.modeling import DominoDraft
from domino_kit.parity import Tolerance, to_cpu, tolerance_for
from domino_kit.paths import decode_steps, replay_steps
from domino_kit.serve.confirm import flush_cache, other_weights
from domino_kit.serve.plan import ServePlan, free_port
from domino_kit.serve.plugin import CONTRACT_VARIABLE, PROBE_VARIABLE, TRACE_PARAM
from domino_kit.serve.server import ServerError
from domino_kit.serve.traces import read_records
from domino_kit.target import Target
from domino_kit.trace import Record, Step, assemble, load_steps, spread
from domino_kit.train.features import encode_row
from domino_kit.train.graph import graph_steps

GRAPH_STEPS = 8
"""Steps of a prompt that go through the training graph, each with a whole target pass."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """A loaded target and draft, and the dtype that they compute in."""

    target: Target
    model: DominoDraft
    end_tokens: list[int]

    @property
    def dtype(self) -> str:
        """Its name."""
        return str(self.target.embedding.weight.dtype).removeprefix("torch.")


@dataclass
class Traces:
    """All steps by path, with the tolerance of each path against the training graph.

    ``runs`` are the accepted runs of every prompt by path, ``answers`` the tokens; ``cached`` is
    how many tokens of a prompt came from the server's prefix cache.
    """

    reference: list[Step] = field(default_factory=list)
    paths: dict[str, tuple[list[Step], Tolerance]] = field(default_factory=dict)
    runs: dict[str, list[list[int] | None]] = field(default_factory=dict)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    def add(self, path: str, steps: Sequence[Step], tolerance: Tolerance) -> None:
        """Steps of one path."""
        known = self.paths.get(path, ([], tolerance))[0]
        self.paths[path] = ([*known, *(to_cpu(step) for step in steps)], tolerance)


def recorded_steps(folder: Path) -> tuple[list[Step], str] | None:
    """The trace that training kept beside the weights, and its dtype; ``None`` without one."""
    if not (folder / TRACE_NAME).exists():
        return None
    steps, facts = load_steps(folder / TRACE_NAME)
    return steps, facts.get("dtype", "float32")


def trace_recorded(traces: Traces, pair: Pair, recorded: tuple[list[Step], str]) -> None:
    """The training run's own trace, and the training graph's at the same steps now."""
    steps, dtype = recorded
    traces.reference += _graph(pair, steps)
    traces.add("training run", steps, tolerance_for([dtype, pair.dtype]))


def _graph(pair: Pair, steps: Sequence[Step]) -> list[Step]:
    """The same steps from the training graph."""
    encode = encode_row(pair.target)
    return [to_cpu(step) for step in graph_steps(pair.model, pair.target, encode, steps)]


def trace_plain(
    traces: Traces, pair: Pair, prompts: Sequence[list[int]], max_new_tokens: int, say: Say
) -> None:
    """Decode every prompt, and the same steps by replay and by the training graph."""
    tolerance = tolerance_for([pair.dtype])
    answers: list[Answer] = []
    for place, prompt in enumerate(prompts):
        say(f"decode, replay and training graph: prompt {place + 1} of {len(prompts)}")
        name = prompt_name(place)
        answer, steps = decode_steps(
            pair.target, pair.model, name, prompt, max_new_tokens, pair.end_tokens
        )
        chosen = spread(steps, GRAPH_STEPS)
        anchors = [step.anchor for step in chosen]
        if anchors:
            again = replay_steps(pair.target, pair.model, name, prompt, answer.tokens, anchors)
            traces.add("replay", again, tolerance)
        traces.add("decode", chosen, tolerance)
        traces.reference += _graph(pair, chosen)
        answers.append(answer)
    traces.runs["decode"] = [answer.accepted_runs for answer in answers]
    traces.answers["decode"] = [answer.tokens for answer in answers]


def prompt_name(place: int) -> str:
    """The name of a prompt in traces and messages."""
    return f"prompt-{place + 1}"


# -- the server ----------------------------------------------------------------------------------


@contextmanager
def server_with_probe(plan: ServePlan | None, url: str | None, say: Say) -> Iterator[str]:
    """A running server's address: ``url``, or one started with the probe for this block."""
    if url is not None:
        yield base_url(url)
        return
    assert plan is not None
    say("starting SGLang with the draft and the probe")
    with tempfile.TemporaryDirectory(prefix="domino-probe-") as folder:
        environment = {PROBE_VARIABLE: folder, CONTRACT_VARIABLE: "report"}
        with own_server(plan, plan.command, draft=True, environment=environment) as own:
            yield own


def add_live_contract(contract: Contract, report: dict[str, Any], draft: Path) -> None:
    """Take over what the server found when it compared what it loaded with the files it was given.

    Those must be ``draft``'s, which is only certain for a server of our own.
    """
    said = other_weights(report["draft"], draft)
    if said is not None:
        contract.error("draft_weights", said)
    live = report.get("contract")
    if live is None:
        contract.could_not("draft_weights", "the server does not report a contract")
        return
    for each in live["findings"]:
        contract.findings.append(Finding(each["name"], each["severity"], each["message"]))
    contract.looked_at(*live["checked"])
    contract.unchecked += [f"{line} (server)" for line in live["unchecked"]]


def trace_served(
    traces: Traces,
    pair: Pair,
    url: str,
    report: dict[str, Any],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    say: Say,
) -> None:
    """The same prompts through the server: all at once, then one by one from its prefix cache.

    Raises ``ServerError`` for a server that fails or has no probe.
    """
    if not report.get("probe") or not Path(report["probe"]).is_dir():
        raise ServerError(
            f"the server at {url} writes no stage traces here; start it on this machine with "
            f"{PROBE_VARIABLE}=FOLDER in its environment, or leave --url out."
        )
    flush_cache(url)
    tolerance = tolerance_for([pair.dtype, report["draft"]["dtype"]])
    for path, concurrency in (("served", len(prompts)), ("served again", 1)):
        say(f"{path}: {len(prompts)} prompts, {concurrency} at once")
        tag = f"{path.replace(' ', '-')}-{free_port()}"  # a running server keeps older traces
        answers = _ask(url, prompts, max_new_tokens, concurrency, tag)
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if len(answer.tokens) < 2:
                continue  # the only token comes from the prefill: nothing was drafted
            records = read_records(Path(report["probe"]), f"{tag}-{place}")
            _add_served(traces, pair, path, place, [*prompt, *answer.tokens], records, tolerance)
        traces.runs[path] = [answer.accepted_runs for answer in answers]
        traces.answers[path] = [answer.tokens for answer in answers]


def _ask(
    url: str, prompts: Sequence[list[int]], max_new_tokens: int, concurrency: int, tag: str
) -> list[ServedAnswer]:
    sampling = [
        {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "custom_params": {TRACE_PARAM: f"{tag}-{place}"},
        }
        for place in range(len(prompts))
    ]
    answers, _ = ask_all(url, prompts, sampling, concurrency)
    return answers


def _add_served(
    traces: Traces,
    pair: Pair,
    path: str,
    place: int,
    text: list[int],
    records: list[Record],
    tolerance: Tolerance,
) -> None:
    """One served prompt's steps, and the training graph's at those steps.

    Names differ by path, so that each path has its own reference: teacher-forced on what this very
    path proposed.
    """
    name = f"{path}, {prompt_name(place)}"
    steps = spread(assemble(name, text, records), GRAPH_STEPS)
    traces.cached[name] = int(records[0].get("cached_prefix", torch.tensor(0)))
    traces.add(path, steps, tolerance)
    right = [_whole_block(step, pair) for step in steps]
    traces.reference += _graph(pair, right)


def _whole_block(step: Step, pair: Pair) -> Step:
    """The step with as many proposals as the trained block has, if the served one is shorter."""
    proposals = step.values["proposals"]
    missing = pair.model.config.num_proposals - len(proposals)
    if missing <= 0:
        return step
    filled = torch.cat([proposals, proposals[-1:].expand(missing)])
    return replace(step, values={**step.values, "proposals": filled})
