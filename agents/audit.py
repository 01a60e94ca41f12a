"""The record of what was ordered through this agent: who, what, on what, and how it ended.

JSON lines in a file of the runtime folder that only its owner can read. A record that cannot be written (a
full disk, a folder that is gone) stops nothing; whoever ordered is told that it is missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import msgspec

MAX_BYTES: Final = 1 << 20
FILES_KEPT: Final = 5
"""Older files beside the current one, as `audit.jsonl.1` and so on."""


class _Private(RotatingFileHandler):
    """Rotates by size, makes its file private, and says when it cannot write."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.baseFilename, flags, 0o600)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # the end of a record is missing
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\n")
        return TextIOWrapper(os.fdopen(descriptor, "ab"), encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base class's name
        del record
        raise  # noqa: PLE0704 - called while the exception is handled

    def put_away(self) -> None:
        """Close the file: the next record opens whatever lies there then."""
        stream: TextIOWrapper | None = self.stream
        vars(self)["stream"] = None  # as FileHandler itself does
        if stream is not None:
            stream.close()


class AuditLog:
    """Appends records; see this module."""

    def __init__(
        self, path: Path | None, *, max_bytes: int = MAX_BYTES, files_kept: int = FILES_KEPT
    ) -> None:
        """Record in `path`; None records nothing, and says so."""
        self._handler: _Private | None = None
        if path is not None:
            self._handler = _Private(path, maxBytes=max_bytes, backupCount=files_kept, delay=True)

    def write(self, record: Mapping[str, Any]) -> str:
        """Append one record. Returns why that was not possible, empty if it was; never raises."""
        if self._handler is None:
            return "this agent keeps no audit file"
        try:
            line = msgspec.json.encode(record).decode()
            self._handler.emit(logging.makeLogRecord({"msg": "%s", "args": (line,)}))
            self._handler.put_away()
        except Exception as error:
            with contextlib.suppress(Exception):
                self._handler.put_away()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return f"{self._handler.baseFilename} cannot be written: {reason}"
        return ""
