"""Rows that a later call does not measure again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import Row, tell

Pair = TypeVar("Pair")


def rows_of(
    pairs: Sequence[Pair],
    name_of: Callable[[Pair], dict[str, str]],
    measure: Callable[[Sequence[Pair]], Iterator[Row]],
    kept: Path | None,
    limit_s: float,
) -> list[Row]:
    """Return a row for each pair, in the order of the pairs.

    Args:
        pairs: to measure.
        name_of: returns the first cells of a pair's row, which no other row has.
        measure: yields the rows of pairs, in any order.
        kept: file of JSON lines that has rows already and gets the new ones; None: none.
        limit_s: of each search; rows with another limit are measured again.
    """
    found: dict[str, Row] = {}
    if kept is not None and kept.exists():
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
        names = {json.dumps(name_of(pair)) for pair in pairs}
        for row in rows:
            key = json.dumps({name: row[name] for name in name_of(pairs[0])})
            if row["limit, s"] == limit_s and key in names:
                found[key] = row
    missing = [pair for pair in pairs if json.dumps(name_of(pair)) not in found]
    for row in measure(missing):
        key = json.dumps({name: row[name] for name in name_of(pairs[0])})
        found[key] = {**row, "limit, s": limit_s}
        tell(str(found[key]))
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("a") as file:
                print(json.dumps(found[key]), file=file)
    return [found[json.dumps(name_of(pair))] for pair in pairs]
