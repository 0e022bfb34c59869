"""What `domino prepare` shows: progress while answers come, and what became of every prompt."""

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 10.0

Say = Callable[[str], None]


def notes_console(quiet: bool) -> Console:
    """Where notes go: beside the output, so that what is printed for reading stays clean."""
    return Console(stderr=True, quiet=quiet, markup=False, highlight=False, soft_wrap=True)


class Tally:
    """What became of the prompts; counts of this run only, ``earlier`` of the runs before."""

    def __init__(self, dropped: Counter[str], earlier: int) -> None:
        self.dropped = Counter(dropped)
        self.earlier = earlier
        self.answers = self.tokens = self.cut = self.inexact = 0
        self.first_refusal = ""

    def lines(self, max_new_tokens: int, seconds: float) -> list[str]:
        """The summary, one line a subject."""
        speed = f", {self.tokens / seconds:.1f} tokens/s" if self.answers else ""
        earlier = f"; {self.earlier} were there already" if self.earlier else ""
        found = [f"{self.answers} answers, {self.tokens} tokens{speed}{earlier}"]
        if self.cut:
            found.append(f"cut at {max_new_tokens} tokens, and kept: {self.cut}")
        if self.inexact:
            found.append(
                f"kept, but their text is tokenised otherwise than the target wrote it: {self.inexact}"
            )
        if self.dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            found.append(f"dropped: {reasons}")
        if self.first_refusal:
            found.append(f"the first refusal: {self.first_refusal}")
        return found


class Progress:
    """A bar with tokens per second and the time left; plain lines where there is no terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._bar = Bar(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("answers", total=total, speed="")
        self._done = 0
        self._started = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the first question."""
        return max(1e-9, time.monotonic() - self._started)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._bar.start()
        self._started = self._last = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def advance(self, tokens: int, count: int = 1) -> None:
        """Another answer is written, or ``count`` are not to come; ``tokens`` so far in all."""
        self._done += count
        speed = f"{tokens / self.seconds:.1f} tokens/s"
        self._bar.update(self._task, completed=self._done, speed=speed)
        if not self._console.is_terminal and time.monotonic() - self._last > SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            left = self.seconds / self._done * (self._total - self._done)
            self._console.print(
                f"{self._done} of {self._total} answers, {speed}, {left / 60:.1f} minutes left"
            )
