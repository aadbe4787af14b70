"""What is told at the end: who did what, and that nothing was lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """Lines for people.

    Args:
        report: the coordinator's.
    """
    dropped = report["dropped"]
    yield (
        f"{report['committed']} of {report['total']} shares trained, {report['repeated']} of them "
        f"again after a loss, {len(dropped)} dropped"
    )
    if dropped:
        yield f"dropped shares: {', '.join(map(str, dropped))}"
    for number, life in enumerate(report["lives"]):
        done = report["workers"].get(str(number), {})
        failed = report["failed"][number]
        without = f", {failed} exchanges failed" if failed else ""
        came_back = f", came back {life - 1} times" if life > 1 else ""
        away = "" if str(number) in (report["last"] or {}) else ", not there at the end"
        yield (
            f"pipeline {number}: {done.get('committed', 0)} shares, {done.get('lost', 0)} lost"
            f"{without}{came_back}{away}"
        )
