"""What a run shows and writes: progress bar, metrics files, checkpoints with their manifest."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from domino_kit import __version__
from domino_kit.checkpoint import save_draft, write_whole
from domino_kit.fingerprint import WEIGHTS_NAME
from domino_kit.manifest import (
    MANIFEST_NAME,
    TRACE_NAME,
    Manifest,
    git_commit,
    library_versions,
)
from domino_kit.target import choose_dtype
from domino_kit.train.prepare_output import provenance
from domino_kit.train.setup import Run
from domino_kit.train.state import save_state
from domino_kit.train.tracking import Tracker, load_tracker

if TYPE_CHECKING:
    from domino_kit.train.loop import StepSums

METRICS_NAME = "metrics.jsonl"


class Progress:
    """Progress bar on the terminal, ``metrics.jsonl``, TensorBoard events, and a tracker if wanted."""

    def __init__(self, run: Run, done: int, *, quiet: bool, write: bool = True) -> None:
        """``done`` steps lie behind a resumed run; only one process is to ``write``.

        Raises ``ValueError`` if the recipe's tracker cannot start.
        """
        self.run, self.done, self.writes = run, done, write
        self.folder = run.recipe.output.folder
        self.console = Console(stderr=True, quiet=quiet, markup=False)
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
        )
        self.task = self.bar.add_task("train", total=run.total_steps, completed=done, status="")
        self.file: TextIO | None = None
        self.board: Any = None
        self.tracker: Tracker | None = None
        if write and (module := load_tracker(run.recipe)):
            self.tracker = Tracker(module, run.recipe)
        self.accept_length: float | None = None
        self.since = time.monotonic()
        self.samples = 0
        self.named: set[str] = set()

    def __enter__(self) -> "Progress":
        if self.writes:
            from torch.utils.tensorboard import SummaryWriter

            self.folder.mkdir(parents=True, exist_ok=True)
            keep_until(self.folder / METRICS_NAME, self.done)
            self.file = (self.folder / METRICS_NAME).open("a", encoding="utf-8")
            self.board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.done + 1)
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.bar.stop()
        if self.file is not None:
            self.file.close()
            self.board.close()
        if self.tracker is not None:
            self.tracker.finish()

    def step(self, step: int, sums: "StepSums", lr: float, norm: float) -> None:
        """Advance the bar; every ``log_every`` steps write a line of metrics."""
        fresh = sorted(set(sums.empty_rows) - self.named)
        if fresh:  # once a row: it is the same in every epoch
            self.named.update(fresh)
            rows = ", ".join(fresh[:3]) + (f" and {len(fresh) - 3} more" if fresh[3:] else "")
            self.console.print(f"step {step}: no anchor in row {rows}; it weighs nothing")
        regressing = step <= self.run.recipe.train.regress_steps
        self.samples += sums.samples
        rate = self.samples / max(1e-9, time.monotonic() - self.since)
        loss = sums.loss / max(sums.weight, 1e-6)
        accept = f" accept {self.accept_length:.2f}" if self.accept_length is not None else ""
        has_head = self.run.model.config.has_head
        shown_lambda = f" λ {sums.lam:.2f}" if has_head and not regressing else ""
        status = f"loss {loss:.3f}{shown_lambda} {rate:.1f} samples/s{accept}"
        phase = "regress" if regressing else "train"
        self.bar.update(self.task, completed=step, status=status, description=phase)
        if step % self.run.recipe.output.log_every and step != self.run.total_steps:
            return
        if not self.console.is_terminal:  # where no bar can be drawn
            self.console.print(f"step {step} of {self.run.total_steps}: {phase}, {status}")
        values = {"loss": loss, "lr": lr, "gradient_norm": norm, "samples_per_second": rate}
        if not regressing:
            if has_head:
                values["lambda_base"] = sums.lam
            values["teacher_forced_final_loss"] = sums.final / max(sums.weight, 1e-6)
            values["teacher_forced_base_loss"] = sums.base / max(sums.weight, 1e-6)
            values["teacher_forced_accuracy"] = sums.correct / max(sums.rows, 1)
            values["teacher_forced_base_accuracy"] = sums.base_correct / max(sums.rows, 1)
        self._write(step, phase, values)
        self.since, self.samples = time.monotonic(), 0

    def validation(self, step: int, values: dict[str, float]) -> None:
        """Write and print the numbers of a validation."""
        self.accept_length = values["replay_accept_length"]
        self._write(step, "validation", values)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        self.console.print(f"step {step}: {shown}")

    def _write(self, step: int, phase: str, values: dict[str, float]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"step": step, "phase": phase, **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.board.add_scalar(f"{phase}/{name}", value, step)
        if self.tracker is not None:
            self.tracker.log(step, phase, values)


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of a metrics file after ``step``: a resumed run writes them again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            break  # torn by a kill
    write_whole(path, "".join(kept))


def build_manifest(
    run: Run, step: int, command: list[str], measured: dict[str, float], seconds: float
) -> Manifest:
    """The facts of this run, as they are fixed now."""
    config, recipe = run.model.config, run.recipe
    last = config.num_target_layers - 1 in config.target_layer_ids
    return Manifest(
        toolkit_version=__version__,
        libraries=library_versions(),
        command=command,
        git_commit=git_commit(),
        seed=recipe.train.seed,
        recipe=recipe.model_dump(mode="json"),
        target=run.identity,
        mask_token_id=config.mask_token_id,
        mask_token_source=run.mask_token_source,
        target_layer_ids=list(config.target_layer_ids),
        last_layer_norm="before the final norm" if last else None,
        rope={
            "rope_theta": config.rope_theta,
            "head_dim": config.head_dim,
            "table_dtype": "float32",
        },
        shift_label=config.shift_label,
        block_size=config.block_size,
        num_proposals=config.num_proposals,
        weights_dtype=str(_save_dtype(run)).removeprefix("torch."),
        data={
            "train": recipe.data.train,
            "provenance": provenance(recipe.data.train, recipe.data.provenance),
            "rows": len(run.samples),
            "dropped": dict(run.dropped),
            "supervised_tokens": run.supervised_tokens,
            "system_prompts": run.system_prompts,
        },
        training={
            "steps_done": step,
            "steps_planned": run.total_steps,
            "lambda_horizon": run.total_steps - recipe.train.regress_steps,
            "seconds": round(seconds, 1),
        },
        measured=measured,
        draft=config.model_dump(mode="json"),
        allowed=list(run.allowed),
    )


def _save_dtype(run: Run) -> torch.dtype:
    if run.recipe.output.save_dtype != "auto":
        return choose_dtype(run.recipe.output.save_dtype, "cpu")
    return run.target.embedding.weight.dtype


def write_checkpoint(
    run: Run,
    step: int,
    command: list[str],
    measured: dict[str, float],
    seconds: float,
    optimizer: torch.optim.Optimizer | None = None,
) -> Path:
    """Write ``step-N`` whole, then point the run's own folder at it; returns ``step-N``.

    With an ``optimizer`` the run can be resumed from it.

    The run's folder is itself a checkpoint: its files are links through ``latest``, which moves in
    one rename.
    """
    folder = run.recipe.output.folder / f"step-{step}"
    manifest = build_manifest(run, step, command, measured, seconds)

    def add_state(unfinished: Path) -> None:
        if optimizer is not None:
            save_state(unfinished, run, optimizer, step)

    # A resumed run may come by a step whose checkpoint it could not read.
    save_draft(folder, run.model, manifest, _save_dtype(run), replace=True, add=add_state)
    _point(folder.with_name("latest"), folder.name)
    for name in (WEIGHTS_NAME, "config.json", MANIFEST_NAME, TRACE_NAME):
        _point(folder.with_name(name), f"latest/{name}")
    return folder


def _point(link: Path, destination: str) -> None:
    """Make or move a relative symbolic link, atomically."""
    fresh = link.with_name(f".{link.name}-new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(destination)
    fresh.replace(link)
