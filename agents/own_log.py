"""The log of an agent that an engine started: a file in the runtime folder, kept small.

The engine opens `agent.log` and makes it the agent's stdout and stderr. The agent then takes the file over,
so that it can be rotated; what is not logged (an interpreter's last words) must go into the new file too. A
log that goes elsewhere (a terminal, the journal) is somebody else's to bound.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 1 << 20
FILES_KEPT: Final = 3
"""Older files beside the current one, as `agent.log.1` and so on."""
STDERR: Final = 2


class _OwnLog(RotatingFileHandler):
    """Rotates a file that some of this process's standard streams are too."""

    def __init__(self, path: Path, descriptors: Sequence[int], max_bytes: int, files_kept: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=files_kept, encoding="utf-8")
        self._descriptors = descriptors

    def doRollover(self) -> None:  # noqa: N802 - the base class's name
        """Begin a new file, and let the standard streams go there."""
        super().doRollover()
        stream: TextIOWrapper | None = self.stream
        if stream is not None:
            for descriptor in self._descriptors:
                os.dup2(stream.fileno(), descriptor)


def keep_small(path: Path, *, max_bytes: int = MAX_BYTES, files_kept: int = FILES_KEPT) -> bool:
    """Have the root logger write to `path` and rotate it, where stderr goes there; return whether it does.

    To be called by the one process that may write there for long.
    """
    try:
        descriptors = [each for each in (1, STDERR) if _leads_to(each, path)]
        if STDERR not in descriptors:
            return False
        own = _OwnLog(path, descriptors, max_bytes, files_kept)
    except OSError:
        return False
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            own.setFormatter(handler.formatter)
            root.removeHandler(handler)
    root.addHandler(own)
    return True


def _leads_to(descriptor: int, path: Path) -> bool:
    return path.is_file() and os.path.samestat(os.fstat(descriptor), path.stat())
