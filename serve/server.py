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
from typing import IO, Any

import httpx

STOP_SECONDS = 5.0
"""How long SGLang gets to end by itself before it is killed."""

TAIL_LINES = 200
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerError(RuntimeError):
    """The server did not start, or ended by itself."""


class Stopped(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived while a server was running."""


class Server:
    """One SGLang server, running inside a ``with`` block; leaving it stops every process.

    Its output is passed on line by line to ``log`` (``None``: kept for error messages only). In
    the main thread, SIGINT, SIGTERM and SIGHUP end the block with :class:`Stopped`.
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
        self._command, self._environment, self._log = command, environment, log
        self._logged = log is not None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._handlers: dict[int, Any] = {}
        self._armed = False  # whether a signal may raise now
        self._asked = False  # whether one has come

    def __enter__(self) -> "Server":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                    self._handlers[number] = signal.signal(number, self._on_signal)
        # A session of its own: its processes form one group, which can be stopped as a whole, and
        # Ctrl-C in the terminal reaches only us.
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **self._environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()
        if self._asked:
            self.__exit__()
            raise Stopped
        self._armed = True
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False  # a second Ctrl-C must not interrupt the stopping
        try:
            self.stop()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self._asked = True
        if self._armed:
            self._armed = False
            raise Stopped

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.rstrip("\n"))
            if self._log is not None:
                try:
                    self._log.write(line)
                    self._log.flush()
                except (OSError, ValueError):
                    self._log = None  # nobody reads any more; the server must not block on that

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

    def ended(self, within: float) -> bool:
        """Whether the main process ends by itself ``within`` so many seconds."""
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def why_ended(self) -> str:
        """Block until the main process ends by itself, and say what is known, in one line."""
        status = self._process.wait()
        self._reader.join(timeout=2)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        said = [line for line in self._tail if _is_cause(line)]
        if not said and not self._logged:
            said = [line for line in self._tail if line.strip()]
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
