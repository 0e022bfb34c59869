"""The processes of one run: who they are, and the few things that they do together."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn

from domino_kit.parity import ParityError
from domino_kit.serve.server import ServerError

T = TypeVar("T")
BUCKET_BYTES = 64 * 2**20
TIMEOUT = timedelta(minutes=30)
"""The longest that one process may work alone (a checkpoint, a validation) while others wait."""


@dataclass(frozen=True)
class Processes:
    """This process among ``count``; the default is a run of one, in which nothing is sent.

    Every method is called by all processes at the same point, whatever their data: none of them
    depends on whether a process had rows, anchors or gradients.
    """

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part: as even as it gets, in order, empty if there are too few."""
        return list(
            items[len(items) * self.rank // self.count : len(items) * (self.rank + 1) // self.count]
        )

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank."""
        if self.count == 1:
            return [value]
        found: list[T | None] = [None] * self.count
        distributed.all_gather_object(found, value)
        return found  # type: ignore[return-value]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over processes, in float64."""
        if self.count == 1:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64, device=_wire_device())
        distributed.all_reduce(total)
        return total.tolist()

    def together(self, work: Callable[[], T], only_first: bool = False) -> T | None:
        """Do ``work`` (``only_first``: in the first process alone) and go on if nobody failed.

        After an error for users anywhere all processes end: the first one that failed with its
        error, the others silently, with exit status 2. Nobody is left waiting.
        """
        result: T | None = None
        error: Exception | None = None
        if self.first or not only_first:
            try:
                result = work()
            except (ValueError, OSError, ParityError, ServerError) as found:
                error = found
        failed = [place for place, bad in enumerate(self.gather(error is not None)) if bad]
        if error is not None and failed[0] == self.rank:
            raise error
        if failed:
            raise SystemExit(2)
        return result

    def sum_gradients(self, model: nn.Module) -> None:
        """Replace every gradient by its sum over processes.

        A parameter that got no gradient anywhere keeps none; where only some processes have one,
        the others count as zero.
        """
        if self.count == 1:
            return
        parameters = list(model.parameters())
        seen = self.sum([float(p.grad is not None) for p in parameters])
        bucket: list[Tensor] = []
        for parameter, times in zip(parameters, seen, strict=True):
            if times:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
                _sum_bucket(bucket)
                bucket = []
        if bucket:
            _sum_bucket(bucket)


def _sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _wire_device() -> str:
    return "cuda" if distributed.get_backend() == "nccl" else "cpu"


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """The processes that ``torchrun`` started together, or a run of one.

    NCCL where there is a GPU for each process of this machine (untested: it never ran on one), gloo
    on CPUs. Raises ``ValueError`` if there are fewer GPUs than processes.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {local} of this machine has no GPU: there are "
                f"{torch.cuda.device_count()}; start as many processes as there are GPUs."
            )
        torch.cuda.set_device(local)
        distributed.init_process_group("nccl", timeout=TIMEOUT)
    else:
        distributed.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield Processes(rank, count)
    finally:
        distributed.destroy_process_group()
