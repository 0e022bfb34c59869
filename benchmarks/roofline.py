"""The time of a computation's matrix products alone: same shapes, same library, same run."""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from measure import settle
from torch.utils._python_dispatch import TorchDispatchMode

OPERANDS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Operations that all products end in, and which of their arguments are the matrices."""
Product = tuple[torch.Size, torch.Size, torch.dtype]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = OPERANDS.get(func.overloadpacket.__name__.rstrip("_"))
        if places is not None:
            left, right = (args[place] for place in places)
            self.found[left.shape, right.shape, left.dtype] += 1
        return func(*args, **(kwargs or {}))


def products(call: Callable[[], Any]) -> Counter[Product]:
    """Shapes and type of every matrix product of a call, forward and backward, and how often."""
    with _Recorder() as recorder:
        call()
    return recorder.found


def product_seconds(found: Counter[Product], device: str, repeats: int = 3) -> float:
    """Seconds of these products: the median of each kind, times how often it occurs."""
    total = 0.0
    for (left, right, dtype), count in found.items():
        a, b = (torch.randn(each, device=device).to(dtype) for each in (left, right))
        out = a @ b  # its memory is in place before the clock starts
        times = []
        for _ in range(min(repeats, count)):
            settle()
            started = time.perf_counter()
            torch.matmul(a, b, out=out)
            settle()
            times.append(time.perf_counter() - started)
        total += count * statistics.median(times)
    return total
