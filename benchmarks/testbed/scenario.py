"""What is measured on a testbed: transfers at the same time, or an all-reduce, and their times."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.testbed.network import Testbed
from planner.errors import PipeplanError

Policy = Literal["together", "sent", "received"]


@dataclass(frozen=True)
class Move:
    """A message between two ranks."""

    source: int
    target: int
    bytes_: int


@dataclass(frozen=True)
class Scenario:
    """Things that begin at the same moment.

    Attributes:
        moves: sent in this order, each receive posted long before.
        members: ranks of an all-reduce, instead of moves.
        bytes_: of the all-reduce.
        repeats: how often it is timed, after one time that does not count.
        policy: when a source sends its next message: at once (together), when gloo says that it
            has sent the one before (sent), or when the target says that it has it (received).
    """

    moves: tuple[Move, ...] = ()
    members: tuple[int, ...] = ()
    bytes_: int = 0
    repeats: int = 5
    policy: Policy = "together"

    @property
    def ranks(self) -> set[int]:
        """Who takes part."""
        ends = {rank for move in self.moves for rank in (move.source, move.target)}
        return ends | set(self.members)

    @property
    def count(self) -> int:
        """The number of timed ends: of each move, or of the all-reduce at each member."""
        return len(self.moves) or len(self.members)


@dataclass(frozen=True)
class Times:
    """Seconds from the common start until each move, or member, was done; one row a repeat."""

    rows: tuple[tuple[float, ...], ...]

    def median_s(self, place: int = 0) -> float:
        """Return the median time of a move."""
        return statistics.median(row[place] for row in self.rows)

    @property
    def last_s(self) -> float:
        """The time after which all were done: the median of the repeats."""
        return statistics.median(max(row) for row in self.rows)


def scenario_of(data: dict[str, Any]) -> Scenario:
    """A scenario from plain data."""
    moves = tuple(Move(**move) for move in data["moves"])
    return Scenario(**{**data, "moves": moves, "members": tuple(data["members"])})


def measure(testbed: Testbed, devices: Sequence[str], scenarios: Sequence[Scenario]) -> list[Times]:
    """Run scenarios one after another on processes that stay, one a device.

    Raises:
        PipeplanError: with what the processes said if one of them failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = json.dumps([asdict(scenario) for scenario in scenarios])
        (folder / "scenarios.json").write_text(text)
        command = [sys.executable, "-m", "benchmarks.testbed.probe", str(folder)]
        outcome = testbed.run(command, devices)
        if outcome.status:
            raise PipeplanError(
                f"measuring ended with status {outcome.status}: {''.join(outcome.outputs)}"
            )
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(devices))]
    return [_merged(scenario, number, found) for number, scenario in enumerate(scenarios)]


def _merged(scenario: Scenario, number: int, found: Sequence[Any]) -> Times:
    """Ends from the ranks that saw them, starts from those that began; one clock for all."""
    rows = []
    for repeat in range(scenario.repeats):
        records = [rank[number][repeat] for rank in found if rank[number]]
        begin = min(record["begin_s"] for record in records if record["begin_s"] is not None)
        ends = {int(place): end for record in records for place, end in record["ends_s"].items()}
        rows.append(tuple(ends[place] - begin for place in range(scenario.count)))
    return Times(tuple(rows))
