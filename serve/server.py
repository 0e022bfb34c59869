"""An SGLang server as a child process: started, watched, and stopped with all its processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

import httpx

STOP_SECONDS = 5.0
"""How long SGLang gets to end by itself before it is killed."""

TAIL_LINES = 200


class ServerError(RuntimeError):
    """The server did not start, or ended by itself."""


class Server:
    """One SGLang server. Use as a context manager; leaving it stops every process.

    Its output is passed on line by line to ``log`` (``None``: kept for error messages only).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        host: str,
        port: int,
        log: IO[str] | None = sys.stderr,
    ) -> None:
        self.url = f"http://{_reachable(host)}:{port}"
        self._log = log
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        # A session of its own: its processes form one group, which can be stopped as a whole, and
        # Ctrl-C in the terminal reaches only us.
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.rstrip("\n"))
            if self._log is not None:
                self._log.write(line)
                self._log.flush()

    @property
    def pid(self) -> int:
        """Of the main process, which is also its process group."""
        return self._process.pid

    def wait_ready(self, timeout: float) -> None:
        """Block until the server answers; raises :class:`ServerError` if it ends or is too slow."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(self.why_ended())
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        raise ServerError(f"the server did not answer within {timeout:.0f} s.")

    def wait(self) -> int:
        """Block until the main process ends; its exit status."""
        return self._process.wait()

    def why_ended(self) -> str:
        """What is known about a server that ended by itself, in one line."""
        status = self._process.wait()
        self._reader.join(timeout=2)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said = [line for line in self._tail if _is_cause(line)]
        reason = f": {said[-1].strip()}" if said else "; see its output above."
        return f"the SGLang server ended with {how}{reason}"

    def stop(self) -> None:
        """End every process of the server: asked first, killed after ``STOP_SECONDS``."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        # Children outlive a main process that was killed; the group is theirs too.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=2)


def _reachable(host: str) -> str:
    """An address to ask a server that listens on ``host``."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _is_cause(line: str) -> bool:
    """Whether a line of output looks like the reason for an end."""
    plain = line.strip()
    named = plain.split(":", 1)[0]
    raised = named.endswith(("Error", "Exception")) and " " not in named
    return raised or ": error: " in plain or "crashed" in plain
