"""Times, sizes and counts as text for people, and rounded figures."""

from collections.abc import Iterable
from typing import NamedTuple


class SizeUnit(NamedTuple):
    """A unit of sizes in memory."""

    symbol: str
    bytes_: int


SIZES = [SizeUnit(f"{prefix}iB", 1024 ** (6 - place)) for place, prefix in enumerate("EPTGMK")]
MEASURED_DIGITS = 5
"""Significant digits of what was measured."""


class TimeUnit(NamedTuple):
    """A unit of time and how many of it make a second."""

    symbol: str
    per_second: float


def time_unit(span_s: float) -> TimeUnit:
    """Return the unit in which a span of time is easiest to read: s, ms or µs.

    Args:
        span_s: the longest time to show, in seconds.
    """
    if span_s >= 10:
        return TimeUnit("s", 1.0)
    return TimeUnit("ms", 1e3) if span_s >= 1e-3 else TimeUnit("µs", 1e6)


def format_seconds(seconds: float) -> str:
    """Format a time with four significant digits and its unit, such as ``207.5 ms``."""
    unit = time_unit(seconds)
    return f"{four_digits(seconds * unit.per_second)} {unit.symbol}"


def format_bytes(bytes_: float) -> str:
    """Format a size with four significant digits and its unit, such as ``1.25 GiB``."""
    unit = size_unit(bytes_)
    return f"{four_digits(bytes_ / unit.bytes_)} {unit.symbol}"


def size_unit(bytes_: float) -> SizeUnit:
    """Return the largest unit that a size has at least one of; bytes if there is none."""
    return next((unit for unit in SIZES if abs(bytes_) >= unit.bytes_), SizeUnit("B", 1))


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Format a number with its noun, such as ``1 stage``, ``2 batches`` or ``5,000 layers``."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as in a sentence, such as ``1 and 2``."""
    return " and ".join(map(str, numbers))


def and_more(number: int, noun: str) -> str:
    """Format how many more there are than those shown, such as `` (and 3 stages more)``."""
    return f" (and {plural(number, noun)} more)" if number else ""


def significant(value: float, digits: int) -> float:
    """Round to so many significant digits."""
    return float(f"{value:.{digits}g}")


def four_digits(value: float) -> str:
    """Format four significant digits, without an exponent for large numbers."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
