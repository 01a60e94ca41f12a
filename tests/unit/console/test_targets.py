"""Host arguments: what is understood, and what is refused with which words."""

import pytest

from kvtop.console.fleet.errors import TargetError
from kvtop.console.fleet.targets import LocalTarget, SshTarget, parse_targets


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("p01", SshTarget("p01", "p01")),
        ("ops@p01", SshTarget("ops@p01", "p01", "ops")),
        ("ops@p01:2222", SshTarget("ops@p01:2222", "p01", "ops", 2222)),
        ("[::1]:2222", SshTarget("[::1]:2222", "::1", None, 2222)),
        ("me@realm@p01", SshTarget("me@realm@p01", "p01", "me@realm")),
    ],
)
def test_a_host_is_user_host_and_port(argument: str, expected: SshTarget) -> None:
    assert parse_targets([argument]) == (expected,)


def test_ranges_expand_in_order_and_keep_their_width() -> None:
    labels = [target.label for target in parse_targets(["ops@r[1-2]-p[08-10,12]:22"])]
    assert labels == [f"ops@r{r}-p{p}:22" for r in (1, 2) for p in ("08", "09", "10", "12")]


def test_a_host_named_twice_counts_once() -> None:
    assert [target.label for target in parse_targets(["p[1-2]", "p2", "p3"])] == ["p1", "p2", "p3"]


def test_local_and_unix_targets_are_this_machine() -> None:
    local, socket = parse_targets(["local", "unix:/run/kvtop/view.sock"])
    assert isinstance(local, LocalTarget)
    assert local.socket is None
    assert isinstance(socket, LocalTarget)
    assert str(socket.socket) == "/run/kvtop/view.sock"


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("p01;reboot", "';'"),
        ("$(id)", "'$'"),
        ("p01`id`", "'`'"),
        ("p 01", "' '"),
        ("-oProxyCommand=x", "'='"),
        ("-p01", "starts with '-'"),
        ("", "is empty"),
        ("@p01", "user name is empty"),
        ("a b@p01", "user name holds ' '"),
        ("p01:", "port must be a number"),
        ("p01:0", "port must be a number"),
        ("p01:70000", "port must be a number"),
        ("p01:2²", "port must be a number"),
        ("::1", "IPv6 address in brackets"),
        ("p[a-b]", "brackets hold numbers"),
        ("p[3-1]", "ends before it starts"),
        ("p[1-]", "no number"),
        ("p[1-99999]", "more than 4096"),
        ("p[0-999][0-999]", "more than 4096"),
        ("p[1-" + "9" * 5000 + "]", "at most 9 digits"),
        ("unix:relative.sock", "must be absolute"),
    ],
)
def test_what_names_no_host_is_refused_with_the_reason(argument: str, words: str) -> None:
    with pytest.raises(TargetError) as caught:
        parse_targets([argument])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
