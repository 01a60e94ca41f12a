"""Numbers to short texts that fit a column. None is unknown and reads `–`; 0 is a measured nothing."""

from __future__ import annotations

import time

from kvtop.agents import text

UNKNOWN = "–"

_SI = ("", "k", "M", "G", "T", "P")


def count(value: int | None) -> str:
    """Return a count, with thousands shortened.

    >>> count(999), count(12_345), count(3_400_000), count(None)
    ('999', '12.3k', '3.40M', '–')
    """
    if value is None:
        return UNKNOWN
    return str(value) if abs(value) < 1000 else _si(value)


def size(value_bytes: float | None) -> str:
    """Return bytes in decimal units, as networks count them.

    >>> size(512), size(65_536), size(1.2e9), size(None)
    ('512B', '65.5kB', '1.20GB', '–')
    """
    if value_bytes is None:
        return UNKNOWN
    return f"{value_bytes:.0f}B" if value_bytes < 1000 else f"{_si(value_bytes)}B"


def _si(value: float) -> str:
    step = 0
    while abs(value) >= 999.5 and step < len(_SI) - 1:
        value /= 1000
        step += 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{_SI[step]}"


def ratio(value: float | None) -> str:
    """Return how many of one there are to one of another, with three digits.

    >>> ratio(3.8333), ratio(0.1667), ratio(160), ratio(None)
    ('3.83', '0.17', '160', '–')
    """
    return UNKNOWN if value is None else _three(value)


def share(value: float | None) -> str:
    """Return a share between 0 and 1 as per cent.

    >>> share(0.004), share(0.034), share(1), share(None)
    ('0.4%', '3%', '100%', '–')
    """
    if value is None:
        return UNKNOWN
    percent = 100 * value
    return f"{percent:.1f}%" if 0 < percent < 0.95 else f"{percent:.0f}%"


def duration(seconds: float | None) -> str:
    """Return a measured duration with three digits.

    >>> duration(0.0000042), duration(0.0123), duration(1.5), duration(75), duration(None)
    ('4.20µs', '12.3ms', '1.50s', '75.0s', '–')
    """
    if seconds is None:
        return UNKNOWN
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if abs(seconds) * factor < 999.5:
            return f"{_three(seconds * factor)}{unit}"
    return f"{_three(seconds)}s"


def _three(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def microseconds(value_us: float | None) -> str:
    """Return a duration that NIXL reports in µs.

    >>> microseconds(812.0), microseconds(None)
    ('812µs', '–')
    """
    return duration(None if value_us is None else value_us / 1e6)


def age(seconds: float | None) -> str:
    """Return how long ago, for people: two units at most.

    >>> age(3725), age(None)
    ('1h02m', '–')
    """
    return UNKNOWN if seconds is None else text.age(seconds)


def countdown(seconds: float | None) -> str:
    """Return the time left until a deadline; behind it, by how much it is over.

    >>> countdown(29.9), countdown(-3.2), countdown(None)
    ('29s', '-3s', '–')
    """
    if seconds is None:
        return UNKNOWN
    return f"-{age(-seconds)}" if seconds < 0 else age(seconds)


def clock_time(wall_s: float, *, millis: bool = False) -> str:
    """Return the time of day in the console's time zone: `14:03:11`, or `14:03:11.042`."""
    shown = time.strftime("%H:%M:%S", time.localtime(wall_s))
    return f"{shown}.{int(wall_s % 1 * 1000):03}" if millis else shown
