"""A connector whose D tells peers to shake hands through a relay, which a test can hold up.

vLLM loads it through `kv_connector_module_path`; it is never part of the product.
"""

from __future__ import annotations

import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from kvtop.connector import KvtopConnector

RELAY_PORT: Final = "KVTOP_TEST_RELAY_PORT"


class RelayedConnector(KvtopConnector):
    """Like `KvtopConnector`, but D's push half is reached at the port that KVTOP_TEST_RELAY_PORT names."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        if self._vllm_config.kv_transfer_config.kv_role == "kv_consumer":
            self.push.connector_scheduler.side_channel_port = int(os.environ[RELAY_PORT])


class Relay:
    """Carries connections to a port, or holds them up while its gate is closed."""

    def __init__(self) -> None:
        self.target_port = 0
        self._open = threading.Event()
        self._open.set()
        relay = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                relay._open.wait()
                with suppress(OSError), socket.create_connection(("127.0.0.1", relay.target_port)) as there:
                    back = threading.Thread(target=_carry, args=(there, self.request), daemon=True)
                    back.start()
                    _carry(self.request, there)
                    back.join()

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Carry nothing of new connections until the end of the block."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def close(self) -> None:
        self._open.set()
        self._server.shutdown()
        self._server.server_close()


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
