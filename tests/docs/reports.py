"""Rows of the benchmarks' raw results, in benchmarks/results."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from builders import ROOT

Rows = list[dict[str, Any]]


@cache
def results(name: str) -> Mapping[str, Any]:
    """Return a file of benchmarks/results by its name, without ``.json``."""
    found: Mapping[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return found


def rows(name: str, section: str, **where: object) -> Rows:
    """Return the rows of a section whose cells are as given.

    Raises:
        LookupError: if there are none.
    """
    found = results(name).get(section, {"rows": []})["rows"]
    chosen = [r for r in found if all(r[key] == value for key, value in where.items())]
    if not chosen:
        raise LookupError(f"benchmarks/results/{name}.json has no row in {section} with {where}")
    return chosen


def column(name: str, section: str, key: str, **where: object) -> list[Any]:
    """Return a column of the rows of a section whose cells are as given."""
    return [row[key] for row in rows(name, section, **where)]
