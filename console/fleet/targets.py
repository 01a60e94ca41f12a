"""Host arguments to targets: `user@host:port`, ranges such as `p[01-08]`, `unix:/path` and `local`.

Host and user names reach `~/.ssh/config`, where `Match exec` and `ProxyCommand` put them into a shell. So a
name holds letters, digits, `.`, `-` and `_` only, and everything else is refused here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kvtop.console.fleet.errors import TargetError, one_line

MAX_TARGETS = 4096
"""Most targets that one command line may name; a typo in a range should not open a million connections."""

MAX_DIGITS = 9
"""Most digits of a number in a range."""

_RANGE = re.compile(r"\[([0-9][0-9,-]*)\]")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9]+)?")
_BRACKETED = re.compile(r"\[(?P<host>[^\]]*:[^\]]*)\](?::(?P<port>.*))?")


class SshTarget(msgspec.Struct, frozen=True):
    """A host that is reached over SSH. What is None is left to `~/.ssh/config` and its defaults."""

    label: str
    """As the operator knows it: the argument with its range expanded."""
    host: str
    user: str | None = None
    port: int | None = None


class LocalTarget(msgspec.Struct, frozen=True):
    """An agent on this machine, reached through its Unix socket."""

    label: str
    socket: Path | None = None
    """None: the sockets in this user's runtime folder."""


Target = SshTarget | LocalTarget


def parse_targets(arguments: Iterable[str]) -> tuple[Target, ...]:
    """Parse all host arguments; one that is named twice counts once.

    >>> [target.label for target in parse_targets(["p[01-02]", "local", "p01"])]
    ['p01', 'p02', 'local']

    Raises:
        TargetError: an argument names no host, or there are more than `MAX_TARGETS`.
    """
    targets: dict[str, Target] = {}
    for argument in arguments:
        for label in expand(argument):
            targets.setdefault(label, parse_target(label))
            if len(targets) > MAX_TARGETS:
                raise TargetError(f"more than {MAX_TARGETS} hosts named: narrow the range {argument!r}")
    return tuple(targets.values())


def expand(argument: str) -> Iterator[str]:
    """Expand the ranges of one argument; digits keep their width.

    >>> list(expand("p[08-10,12]-[a]"))
    Traceback (most recent call last):
    kvtop.console.fleet.errors.TargetError: 'p[08-10,12]-[a]': brackets hold numbers, e.g. p[01-08] or p[1,4]
    >>> list(expand("p[08-10,12]"))
    ['p08', 'p09', 'p10', 'p12']
    """
    if argument.startswith("unix:"):
        yield argument
        return
    parts = _RANGE.split(argument)
    outside = "".join(parts[::2])
    if ("[" in outside or "]" in outside) and not _BRACKETED.search(outside):
        raise TargetError(f"{one_line(argument)!r}: brackets hold numbers, e.g. p[01-08] or p[1,4]")
    numbers = [list(_numbers(argument, part)) for part in parts[1::2]]
    for combination in itertools.islice(itertools.product(*numbers), MAX_TARGETS + 1):
        pieces = itertools.zip_longest(parts[::2], combination, fillvalue="")
        yield "".join(itertools.chain.from_iterable(pieces))


def _numbers(argument: str, part: str) -> Iterator[str]:
    for piece in part.split(","):
        first, dash, last = piece.partition("-")
        if not first or (dash and not last) or "-" in last:
            raise TargetError(f"{argument!r}: {piece!r} is no number and no range such as 01-08")
        if max(len(first), len(last)) > MAX_DIGITS:
            raise TargetError(
                f"{one_line(argument, 40)!r}: a number in a range has at most {MAX_DIGITS} digits"
            )
        start, end = int(first), int(last or first)
        if end < start:
            raise TargetError(f"{argument!r}: the range {piece} ends before it starts")
        if end - start >= MAX_TARGETS:
            raise TargetError(f"{argument!r}: the range {piece} names more than {MAX_TARGETS} hosts")
        for number in range(start, end + 1):
            yield str(number).zfill(len(first))


def parse_target(label: str) -> Target:
    """Parse one argument without ranges.

    >>> parse_target("ops@p01:2222")
    SshTarget(label='ops@p01:2222', host='p01', user='ops', port=2222)
    >>> parse_target("[::1]:22").host
    '::1'

    Raises:
        TargetError: it names no host; the message says why.
    """
    if label == "local":
        return LocalTarget(label)
    if label.startswith("unix:"):
        return _local(label)
    user, at, address = label.rpartition("@")
    host, port = _host_and_port(label, address)
    if at and not _USER.fullmatch(user):
        raise TargetError(_refusal(label, "user name", user))
    if not (_NAME.fullmatch(host) or _IPV6.fullmatch(host)):
        raise TargetError(_refusal(label, "host name", host))
    return SshTarget(label, host, user if at else None, _port(label, port))


def _local(label: str) -> LocalTarget:
    path = Path(label.removeprefix("unix:"))
    if not path.is_absolute():
        raise TargetError(
            f"{one_line(label)!r}: the socket's path must be absolute, e.g. unix:/run/kvtop/view.sock"
        )
    return LocalTarget(label, path)


def _host_and_port(label: str, address: str) -> tuple[str, str | None]:
    if bracketed := _BRACKETED.fullmatch(address):
        return bracketed["host"], bracketed["port"]
    if address.count(":") > 1:
        raise TargetError(f"{one_line(label)!r}: write an IPv6 address in brackets, e.g. [::1]:22")
    host, colon, port = address.partition(":")
    return host, port if colon else None


def _port(label: str, port: str | None) -> int | None:
    if port is None:
        return None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise TargetError(f"{one_line(label)!r}: the port must be a number from 1 to 65535")
    return int(port)


def _refusal(label: str, what: str, name: str) -> str:
    if not name:
        return f"{one_line(label)!r}: the {what} is empty"
    bad = sorted({c for c in name if not (c.isascii() and (c.isalnum() or c in "._-"))})
    why = f"holds {one_line(' '.join(map(repr, bad)))}" if bad else f"starts with {name[0]!r}"
    return f"{one_line(label)!r}: the {what} {why}; letters, digits, '.', '-' and '_' are allowed"
