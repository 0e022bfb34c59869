"""What all benchmarks share: median times of variants run in turn, extra peak memory, tables, rows.

The scripts are run as files (``python benchmarks/NAME.py``), so they import this as ``measure``.
"""

import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from domino_kit.manifest import library_versions


@dataclass
class Row:
    """One line of a benchmark: a variant at a shape, such as ``{"S": 2048, "N": 256}``.

    ``extra_peak_bytes`` as in :func:`extra_peak`; ``roofline_seconds`` is the time of the matrix
    products alone; ``more`` holds what only one benchmark knows, such as a speed.
    """

    variant: str
    shape: dict[str, Any]
    seconds: float
    extra_peak_bytes: int | None = None
    roofline_seconds: float | None = None
    more: dict[str, Any] = field(default_factory=dict)


def median_seconds(
    variants: dict[str, Callable[[], Any]], repeats: int, warm_up: bool = True
) -> dict[str, float]:
    """Median seconds of each variant; every repeat runs all of them in turn.

    So whatever else the machine does falls on all of them. Every other repeat turns the order
    around. What a variant returns is freed before the next one starts.
    """
    if warm_up:
        for call in variants.values():
            call()
    times = _alternate(variants, repeats)
    return {name: statistics.median(each) for name, each in times.items()}


def _alternate(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name in list(variants) if repeat % 2 == 0 else list(variants)[::-1]:
            seconds, result = _timed(variants[name])
            times[name].append(seconds)
            del result
    return times


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    settle()
    started = time.perf_counter()
    result = call()
    settle()
    return time.perf_counter() - started, result


def extra_peak(call: Callable[[], Any]) -> int | None:
    """Bytes that a call needs at its peak beyond its inputs and what it returns.

    On a GPU by PyTorch's allocator, else by what of the process is resident (Linux; ``None``
    elsewhere): the peak that the kernel counted, less the larger of what was there before and what
    is there afterwards while the result is alive. Memory that the C library holds back is returned
    first, so that a variant cannot hide in what another one left.
    """
    return _timed_peak(call)[1]


def _timed_peak(call: Callable[[], Any]) -> tuple[float, int | None]:
    gc.collect()
    if torch.cuda.is_available():
        return _timed_peak_cuda(call)
    peak = Path("/proc/self/clear_refs")
    if not peak.exists():
        return _timed(call)[0], None
    _trim()
    before = _resident("VmRSS")
    peak.write_text("5")  # the kernel forgets the peak so far (man 5 proc)
    seconds, result = _timed(call)
    highest = _resident("VmHWM")
    _trim()
    after = _resident("VmRSS")
    del result
    return seconds, max(0, highest - max(before, after))


def _timed_peak_cuda(call: Callable[[], Any]) -> tuple[float, int]:
    settle()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds, result = _timed(call)
    found = torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())
    del result
    return seconds, found


def settle() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _trim() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def _resident(name: str) -> int:
    """Bytes of a field of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {name}.")


def measure(
    shape: dict[str, Any],
    variants: dict[str, Callable[[], Any]],
    repeats: int,
    *,
    count_first: bool = False,
) -> list[Row]:
    """A row for each variant: its extra peak first, which also warms it up, then its time.

    ``count_first``: variants take seconds, and that first run is one of the repeats.
    """
    first = {name: _timed_peak(call) for name, call in variants.items()}
    times = _alternate(variants, repeats - count_first)
    for name, (seconds, _) in first.items():
        times[name] += [seconds] if count_first else []
    return [
        Row(name, shape, statistics.median(times[name]), first[name][1]) for name in variants
    ]  # fmt: skip


def fitted_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent ``p`` of ``cost = c · size ** p``, by least squares over the logarithms."""
    x, y = torch.tensor(sizes).double().log(), torch.tensor(costs).double().log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


def shape_text(shape: dict[str, Any]) -> str:
    """``S 2048, N 256``."""
    return ", ".join(f"{name} {value}" for name, value in shape.items())


def show(title: str, rows: Sequence[Row], baseline: str) -> None:
    """One table; ``times`` is how much faster than the baseline at the same shape a variant is."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = ", ".join(f"{name} {value}" for name, value in library_versions().items())
    table = Table(
        title=title, caption=f"{device}, {torch.get_num_threads()} threads; {versions}",
    )  # fmt: skip
    columns: dict[str, list[str]] = {
        "shape": [shape_text(row.shape) for row in rows],
        "variant": [row.variant for row in rows],
        "seconds": [f"{row.seconds:.4g}" for row in rows],
        "times": [],
        "extra MB": [_number(row.extra_peak_bytes, 2**20) for row in rows],
        "roofline s": [_number(row.roofline_seconds) for row in rows],
        "of it": ["" if row.roofline_seconds is None else f"{row.roofline_seconds / row.seconds:.0%}"
                  for row in rows],
    }  # fmt: skip
    base = {shape_text(row.shape): row.seconds for row in rows if row.variant == baseline}
    for text, row in zip(columns["shape"], rows, strict=True):
        columns["times"].append(_number(base[text] / row.seconds) if text in base else "")
    for name in dict.fromkeys(name for row in rows for name in row.more):
        columns[name] = [_number(row.more.get(name)) for row in rows]
    columns = {name: column for name, column in columns.items() if any(column)}
    for name in columns:
        table.add_column(name, justify="left" if name in ("shape", "variant") else "right")
    for line in zip(*columns.values(), strict=True):
        table.add_row(*line)
    Console(width=max(120, Console().width)).print(table)


def _number(value: Any, unit: int = 1) -> str:
    if value is None:
        return ""
    return f"{value / unit:.4g}" if isinstance(value, float) or unit != 1 else str(value)


def write_rows(path: Path | None, rows: Sequence[Row]) -> None:
    """The rows as a JSON list, each with the versions and threads it was measured with."""
    if path is None:
        return
    common = {"threads": torch.get_num_threads(), "libraries": library_versions()}
    found = []
    for row in rows:
        values = asdict(row)
        more = values.pop("more")
        found.append({k: v for k, v in values.items() if v is not None} | more | common)
    path.write_text(json.dumps(found, indent=1) + "\n")
