"""Where an agent's sockets lie, and why nobody else can put something else there.

The runtime folder is private (mode 0700, owned by the user who runs the engines); whoever can enter it can
talk to the agent, so its owner and mode are checked, not assumed.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

ENV_RUNTIME_DIR: Final = "KVTOP_RUNTIME_DIR"
SYSTEM_FOLDER: Final = Path("/run/kvtop")
MAX_SOCKET_PATH_BYTES: Final = 107
"""`sun_path` holds 108 bytes with its terminating zero (unix(7))."""


class RuntimeFolderError(Exception):
    """The runtime folder cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class RuntimePaths:
    """The runtime folder and what lies in it."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> RuntimePaths:
        """Return the paths in `folder`, whose sockets must have addressable names.

        Raises:
            RuntimeFolderError: the folder's path is too long for a Unix socket.
        """
        paths = cls(folder.absolute())
        if len(os.fsencode(paths.operate)) > MAX_SOCKET_PATH_BYTES:
            raise RuntimeFolderError(
                f"the runtime folder {paths.folder} is too long for a Unix socket "
                f"({MAX_SOCKET_PATH_BYTES} bytes at most): set {ENV_RUNTIME_DIR} to a shorter one"
            )
        return paths

    @classmethod
    def default(cls) -> RuntimePaths:
        """Return the paths that agents, engines and consoles of one user on one host agree on.

        KVTOP_RUNTIME_DIR, else $XDG_RUNTIME_DIR/kvtop, else /run/kvtop for root, else the platform's folder.

        Raises:
            RuntimeFolderError: see `at`.
        """
        if named := os.environ.get(ENV_RUNTIME_DIR):
            return cls.at(Path(named))
        if xdg := os.environ.get("XDG_RUNTIME_DIR"):
            return cls.at(Path(xdg) / "kvtop")
        if os.geteuid() == 0 and os.access(SYSTEM_FOLDER.parent, os.W_OK):
            return cls.at(SYSTEM_FOLDER)
        return cls.at(Path(platformdirs.user_runtime_dir("kvtop")))

    @property
    def ingest(self) -> Path:
        """Where engines report."""
        return self.folder / "ingest.sock"

    @property
    def view(self) -> Path:
        """Where consoles look."""
        return self.folder / "view.sock"

    @property
    def operate(self) -> Path:
        """Where consoles look and act."""
        return self.folder / "operate.sock"

    @property
    def lock(self) -> Path:
        """Held by the one agent that serves this folder; contains its pid."""
        return self.folder / "agent.lock"

    @property
    def log(self) -> Path:
        """Where an agent that an engine started writes its log."""
        return self.folder / "agent.log"

    @property
    def audit(self) -> Path:
        """Where the agent records every command that it was given."""
        return self.folder / "audit.jsonl"

    def prepare(self) -> None:
        """Make the folder, or check the one that is there.

        Raises:
            RuntimeFolderError: it cannot be made, is a link, belongs to another user, or is open to others.
        """
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            found = self.folder.lstat()
        except OSError as error:
            raise RuntimeFolderError(
                f"the runtime folder {self.folder} cannot be made ({error.strerror}): "
                f"set {ENV_RUNTIME_DIR} to a folder of your own"
            ) from error
        problem = _problem(found)
        if problem:
            raise RuntimeFolderError(
                f"the runtime folder {self.folder} {problem}: "
                f"remove it, or set {ENV_RUNTIME_DIR} to another folder"
            )


def _problem(found: os.stat_result) -> str | None:
    """Return what makes a folder unfit for the sockets, None if nothing does."""
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return f"belongs to uid {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):04o}, 0700 is needed)"
    return None
