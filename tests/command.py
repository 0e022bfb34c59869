"""Run the installed `domino` command as a user does: its own process, no network."""

import os
import subprocess
import sys
from pathlib import Path

DOMINO = str(Path(sys.executable).parent / "domino")


def domino(
    *arguments: str | Path, cwd: Path | None = None, limit_kb: int | None = None, timeout: int = 600
) -> subprocess.CompletedProcess[str]:
    """Run ``domino``; ``limit_kb`` makes larger files fail to be written, like a full disk."""
    command = [DOMINO, *map(str, arguments)]
    if limit_kb is not None:
        command = ["bash", "-c", f'ulimit -f {limit_kb}; exec "$@"', "bash", *command]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Assert one clear line with the given words, exit status 2 and no traceback."""
    said = result.stderr.strip()
    assert result.returncode == 2, said
    assert "Traceback" not in said
    assert "Traceback" not in result.stdout
    last = said.splitlines()[-1]
    assert last.startswith("Error: "), said
    for word in words:
        assert word in last, said
