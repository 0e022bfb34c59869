"""`domino train --nproc-per-node`: the processes of one machine, started through torchrun's library."""

import sys
from collections.abc import Sequence


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run ``python -m domino_kit.train ARGUMENTS`` in ``count`` processes; returns the exit status.

    If one fails, the others are stopped, and its status is the whole's.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="domino",  # the endpoint's free port tells runs apart
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "domino_kit.train", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 1
    except SignalException:
        return 130  # the processes have saved a checkpoint and ended
    return 0
