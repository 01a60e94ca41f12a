"""What can go wrong between the console and its fleet, each with its exit code and its remedy.

KvtopError                 exit 1   root of all that kvtop reports in one line
├── TargetError            exit 2   a host argument that names no host
├── InputError             exit 2   a file or option that cannot be used (identity, known hosts, theme)
└── ConnectError           exit 3   no conversation with the agent of one target; `kind` says why
"""

from __future__ import annotations

from typing import ClassVar, Literal

ConnectKind = Literal[
    "unreachable",
    "no-answer",
    "unknown-host-key",
    "changed-host-key",
    "key-refused",
    "not-ssh",
    "no-agent",
    "forbidden",
    "wire-version",
    "refused",
    "protocol",
    "setup",
    "lost",
]
"""Why there is no conversation with an agent.

unreachable: the name does not resolve, there is no route, or the port is closed. no-answer: nothing came
back in time. unknown-host-key, changed-host-key: the host is not the one that known_hosts vouches for.
key-refused: the SSH server takes none of our keys. not-ssh: the port answers, but not as an SSH server that
we understand. no-agent: the host is there, its agent is not. forbidden: this user may not reach the agent's
socket. wire-version: the agent speaks another version. refused: the agent said no. protocol: it spoke
nonsense. setup: a file on this side (SSH config, identity, known_hosts) cannot be used. lost: the
conversation had begun and ended.
"""


class KvtopError(Exception):
    """Root of the errors that end in one line for the operator."""

    exit_code: ClassVar[int] = 1


class TargetError(KvtopError):
    """A host argument that names no host; the message says what is wrong with it."""

    exit_code = 2


class InputError(KvtopError):
    """A file or an option that cannot be used."""

    exit_code = 2


class ConnectError(KvtopError):
    """No conversation with one target's agent.

    `str(error)` is one line: the target, what happened (`what`), and what to do (`remedy`). `reason` is the
    line without the target.
    """

    exit_code = 3

    def __init__(self, target: str, kind: ConnectKind, what: str, remedy: str = "") -> None:
        self.target = target
        self.kind: ConnectKind = kind
        self.what = one_line(what)
        self.remedy = one_line(remedy)
        self.reason = f"{self.what}: {self.remedy}" if remedy else self.what
        super().__init__(f"{target}: {self.reason}")


def one_line(text: str, limit: int = 600) -> str:
    r"""Return `text` as one printable line: text from a remote host may hold anything.

    >>> one_line("a\n b\x1b[31m")
    'a b?[31m'
    """
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in flat)[:limit]
