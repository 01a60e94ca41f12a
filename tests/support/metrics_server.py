"""A real HTTP server that answers as a stock inference server's metrics endpoint does, or fails to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Behaviour = Literal["answer", "hang", "drip", "flood", "fail"]


class MetricsServer(ThreadingHTTPServer):
    """Serves `text` at /metrics, behaving as told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.text = ""
        self.behaviour: Behaviour = "answer"
        self.asked = 0
        self.over = threading.Event()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        self.server.asked += 1
        behaviour = self.server.behaviour
        if behaviour == "hang":
            self.server.over.wait(60)
            return
        if behaviour == "fail" or self.path != "/metrics":
            self.send_error(503 if behaviour == "fail" else 404)
            return
        body = self.server.text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        if behaviour == "answer":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            if behaviour == "answer":
                self.wfile.write(body)
            while behaviour == "drip" and not self.server.over.wait(0.1):
                self.wfile.write(b"#")
                self.wfile.flush()
            while behaviour == "flood" and not self.server.over.is_set():
                self.wfile.write(b"#" * (1 << 16) + b"\n")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def metrics_server(text: str = "") -> Iterator[MetricsServer]:
    """Run such a server."""
    with MetricsServer() as server:
        server.text = text
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
