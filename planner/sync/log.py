"""The append-only log of a run: what schedulers and ledgers were told and decided, a line each.

A line is a JSON object: when, and one thing by its name, such as
``{"at_s": 2.5, "request": {"worker": 0, "key": 1, "iteration": 3}}``. An event comes before the
groups that it led to. The log brings a scheduler back after a crash, and the simulator can replay
the groups of a real run.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from planner.errors import PipeplanError, shorten
from planner.sync.groups.events import (
    Event,
    Finished,
    Group,
    Joined,
    Left,
    Request,
    Scheduler,
    Tick,
)
from planner.sync.ledger import Committed, Dropped, GivenBack, LedgerEvent, Taken

MOST_CHARACTERS = 2**20
"""Of a line: a group of the most workers there can be needs a tenth of that."""
MOST_NUMBER = 2**53
"""Whole numbers up to this are the same in every JSON reader."""

Told = Event | Group | LedgerEvent
_KINDS: Mapping[str, type[Told]] = {
    "request": Request,
    "finished": Finished,
    "left": Left,
    "joined": Joined,
    "tick": Tick,
    "group": Group,
    "taken": Taken,
    "committed": Committed,
    "given_back": GivenBack,
    "dropped": Dropped,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True)
class Entry:
    """A line: what happened, and when, in seconds of the writer's clock."""

    at_s: float
    what: Told


def line_of(entry: Entry) -> str:
    """The line of an entry, without its end."""
    name = _NAMES[type(entry.what)]
    return json.dumps({"at_s": entry.at_s, name: asdict(entry.what)}, allow_nan=False)


def read_log(lines: Iterable[str], source: str, *, may_be_cut: bool = False) -> Iterator[Entry]:
    """The entries of a log.

    Args:
        lines: with their ends, as a file gives them.
        source: the name to use for the log in messages, usually the file's.
        may_be_cut: leave out a last line that has no end: its writer was killed while writing.

    Raises:
        PipeplanError: naming the first line that is not one of a log.
    """
    for number, line in enumerate(lines, 1):
        if may_be_cut and not line.endswith("\n"):
            return
        try:
            yield _entry(line)
        except (ValueError, RecursionError) as error:
            raise PipeplanError(
                f"{source}: line {number}: {error}; the log may be cut or edited"
            ) from None


def bring_back(scheduler: Scheduler, entries: Iterable[Entry]) -> list[Group]:
    """Tell a new scheduler all that a log says its predecessor was told.

    Entries of a ledger are passed over.

    Returns:
        The groups that the last event led to and that the log lacks: the predecessor may have
        died before it told them.

    Raises:
        PipeplanError: naming the first entry, counted from 1, where it decides otherwise.
    """
    untold: deque[Group] = deque()
    for number, entry in enumerate(entries, 1):
        if isinstance(entry.what, LedgerEvent):
            continue
        if isinstance(entry.what, Group):
            decided = untold.popleft() if untold else None
            if decided != entry.what:
                raise _otherwise(number, f"{entry.what} was decided", decided)
        elif untold:
            raise _otherwise(number, f"{entry.what} follows", untold[0])
        else:
            untold.extend(scheduler.handle(entry.what, entry.at_s))
    return list(untold)


def _otherwise(number: int, logged: str, decided: Group | None) -> PipeplanError:
    return PipeplanError(
        f"entry {number}: {logged} where the scheduler now decides {decided}; the log is of other "
        "options, other numbers of workers or keys, or another version"
    )


def _entry(line: str) -> Entry:
    if len(line) > MOST_CHARACTERS:
        raise ValueError(f"{len(line)} characters; expected at most {MOST_CHARACTERS}")
    data = json.loads(line, object_pairs_hook=_unique)
    if not isinstance(data, dict) or len(data) != 2 or "at_s" not in data:
        raise ValueError(f"{shorten(data)} is not 'at_s' and one thing that happened")
    (name,) = data.keys() - {"at_s"}
    if name not in _KINDS:
        raise ValueError(f"{shorten(name)} is not known; expected one of {', '.join(_KINDS)}")
    return Entry(_seconds(data["at_s"]), _told(name, data[name]))


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"at_s: {shorten(value)} is not a finite number")
    return float(value)


def _told(name: str, values: Any) -> Told:
    kind: Any = _KINDS[name]
    names = {field.name: field.type for field in fields(kind)}
    if not isinstance(values, dict) or values.keys() != names.keys():
        raise ValueError(f"{name}: {shorten(values)} has not just the fields {', '.join(names)}")
    told: Told = kind(
        **{
            field: _numbers(value, f"{name}.{field}")
            if str(names[field]).startswith("tuple")
            else _number(value, f"{name}.{field}")
            for field, value in values.items()
        }
    )
    return told


def _numbers(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{field}: {shorten(value)} is not a list")
    return tuple(_number(part, field) for part in value)


def _number(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_NUMBER:
        raise ValueError(f"{field}: {shorten(value)} is not a whole number from 0 on")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field stands there twice")
    return found
