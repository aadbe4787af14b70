"""Older formats of files: what makes each the next one, step by step, on plain data.

A format's number rises when older versions of Pipeplan would misread a new file, or this one an old
one; docs/compatibility.md says when. Each number that a released line wrote has a step here, and a
file of it in ``tests/data/formats``. What lies inside another file (a plan's layer graph) has no
step of its own: the step of the whole changes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

OLDER_COST_MODEL = 0
"""Of files that do not say by which revision of the cost model their figures were made."""
NOTHING_MIGRATED = "nothing: the file did not say by which revision of the cost model"


@dataclass(frozen=True)
class Step:
    """From one format to the next.

    Attributes:
        to: the next format.
        apply: makes data of the one into data of the other. What is wrong in it stays wrong, for
            the reader to tell.
        changes: what is different afterwards, for people.
    """

    to: str
    apply: Callable[[Mapping[str, Any]], dict[str, Any]]
    changes: str


def _plan_with_cost_model(data: Mapping[str, Any]) -> dict[str, Any]:
    """``pipeplan/1`` did not say which revision of the cost model its figures were made by.

    Under that number figures of several revisions were written (of memory, above all), so none of
    them is taken on trust: the bound, which was proved for one of them, becomes 0, and
    :meth:`Plan.parse` predicts anew.
    """
    changed = dict(data)
    _update(changed, "predicted", lower_bound_s=0.0, gap=None)
    _update(
        changed,
        "provenance",
        cost_model=OLDER_COST_MODEL,
        problem_digest=None,
        bound_covers=NOTHING_MIGRATED,
    )
    return changed


def _sweep_with_cost_model(data: Mapping[str, Any]) -> dict[str, Any]:
    """``pipeplan-sweep/1`` did not say which revision of the cost model its times are of."""
    return {**data, "cost_model": OLDER_COST_MODEL}


def _update(data: dict[str, Any], key: str, **fields: Any) -> None:
    """Change a table of the data, if it is one."""
    table = data.get(key)
    if isinstance(table, Mapping):
        data[key] = {**table, **fields}


STEPS: Mapping[str, Step] = {
    "pipeplan/1": Step(
        "pipeplan/2",
        _plan_with_cost_model,
        "plans say by which revision of the cost model they were predicted",
    ),
    "pipeplan-sweep/1": Step(
        "pipeplan-sweep/2",
        _sweep_with_cost_model,
        "sweeps say which revision of the cost model their times are of",
    ),
}
"""By the older format."""


def steps_to(found: object, newest: str) -> tuple[Step, ...]:
    """The steps from one format to another, in order; none if there is no way."""
    steps: list[Step] = []
    while found != newest:
        step = STEPS.get(found) if isinstance(found, str) else None
        if step is None:
            return ()
        steps.append(step)
        found = step.to
    return tuple(steps)


def migrate(data: Mapping[str, Any], newest: str, source: str) -> Mapping[str, Any]:
    """Plain data of an older format in the newest one; any other data as it is.

    A warning of this module's logger tells of it.

    Args:
        data: as a file held it; left as it is.
        newest: the format to reach.
        source: the file's name, for the note.
    """
    for step in steps_to(data.get("format"), newest):
        logger.warning("%s: read from %s as %s: %s", source, data["format"], step.to, step.changes)
        data = {**step.apply(data), "format": step.to}
    return data
