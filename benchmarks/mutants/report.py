"""The Markdown report of a mutation test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.mutants.session import KILLED, SURVIVED, UNCHANGED, UNCOVERED, Outcome
from benchmarks.reporting.report import table

RESULTS = (KILLED, SURVIVED, UNCOVERED)
WIDEST = 70
"""Characters of code shown."""


def render(
    outcomes: Sequence[Outcome], broken: Sequence[str], root: Path, seed: int, budget_s: float
) -> str:
    """Return the report: the share killed in each room, then the mutants that were not."""
    rooms = list(dict.fromkeys(outcome.mutant.room for outcome in outcomes))
    tried = [outcome for outcome in outcomes if outcome.result != UNCHANGED]
    shares = [_share(room, [each for each in tried if each.mutant.room == room]) for room in rooms]
    parts = [
        f"{len(tried)} mutants, seed {seed}, at most {budget_s:g} CPU seconds of tests a mutant.\n",
        table(("room", "mutants", *RESULTS, "killed %"), [*shares, _share("all", tried)]),
        table(
            ("not killed", "code", "mutant", "tests run"),
            [_survivor(outcome, root) for outcome in tried if outcome.result != KILLED],
        ),
    ]
    if broken:
        names = ", ".join(broken)
        parts.append(f"Left out, since they fail or take long without a mutant: {names}\n")
    return "\n".join(parts)


def _share(room: str, outcomes: Sequence[Outcome]) -> list[object]:
    counts = Counter(outcome.result for outcome in outcomes)
    percentage = 100 * counts[KILLED] / max(len(outcomes), 1)
    return [room, len(outcomes), *(counts[result] for result in RESULTS), f"{percentage:.1f}"]


def _survivor(outcome: Outcome, root: Path) -> list[str]:
    mutant = outcome.mutant
    place = f"{mutant.path.relative_to(root)}:{mutant.line}"
    tests = f"{outcome.tests_run} of {outcome.tests}"
    return [place, _code(mutant.before), _code(mutant.after), tests]


def _code(text: str) -> str:
    """Return code in one table cell."""
    line = " ".join(text.split())
    if len(line) > WIDEST:
        line = line[: WIDEST - 1] + "…"
    return "`" + line.replace("|", "\\|") + "`"
