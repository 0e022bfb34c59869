"""A small OpenAI-compatible server in its own process: answers by rule, and fails as told.

Run as ``python -m tests.openai_server FOLDER``. It writes its port to ``FOLDER/port`` and every
chat request to ``FOLDER/requests.jsonl``; ``FOLDER/plan.json`` holds the statuses of the first
requests, ``seconds`` an answer takes, the ``key`` that it wants, and whether ``wrong_count`` is
said of prompts.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOCK = threading.Lock()


def answer_to(messages: list[dict[str, Any]]) -> str:
    """What it says to a conversation."""
    return f"answer {len(messages)} to {messages[-1]['content']}"


class Handler(BaseHTTPRequestHandler):
    """Chat completions and nothing else."""

    folder: Path
    plan: dict[str, Any]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            statuses = self.plan.get("statuses") or []
            status = statuses.pop(0) if statuses else 200
            key = self.plan.get("key")
            if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                status = 401
            with (self.folder / "requests.jsonl").open("a") as log:
                log.write(json.dumps({"path": self.path, "status": status, **body}) + "\n")
        if status != 200 or self.path != "/v1/chat/completions":
            self._send(status if status != 200 else 404, {"error": "as planned"})
            return
        time.sleep(self.plan.get("seconds", 0.0))
        message = {"role": "assistant", "content": answer_to(body["messages"])}
        usage = {"prompt_tokens": 1, "completion_tokens": 5} if self.plan.get("wrong_count") else {}
        self._send(
            200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        )

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    Handler.folder = Path(sys.argv[1])
    Handler.plan = json.loads((Handler.folder / "plan.json").read_text())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fresh = Handler.folder / "port.new"
    fresh.write_text(str(server.server_address[1]))
    fresh.rename(Handler.folder / "port")
    server.serve_forever()


if __name__ == "__main__":
    main()
