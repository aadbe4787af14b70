"""What the turns found, as the first rank gathers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from executor.measure_links.turns import Flow, Turn
from planner.errors import PipeplanError
from planner.units import format_seconds, plural
from planner.wiring.device_types import KnownType
from planner.wiring.measured import Ends, Measurements, Member, Reduction, Together
from planner.wiring.message_fit import OfEqual, OneWay, fit_one_way

Found = Mapping[int, Any]
"""By rank, what it said of a turn: plain JSON values."""


class Record:
    """Grows turn by turn.

    Args:
        members: devices by rank.
        types: of devices, by name.
        of_equal: what counts of equal messages and all-reduces.
    """

    def __init__(
        self,
        members: Sequence[Member],
        types: Mapping[str, KnownType],
        of_equal: OfEqual = median,
    ) -> None:
        self._of_equal = of_equal
        self.members = tuple(members)
        self.types = dict(types)
        self.turns_done = 0
        self._ways: dict[Ends, OneWay] = {}
        self._together: list[Together] = []
        self._reductions: list[Reduction] = []
        self.notes: list[str] = [known.note for known in types.values() if known.note]

    @property
    def measurements(self) -> Measurements:
        """What there is so far."""
        types = {name: known.figures for name, known in self.types.items()}
        return Measurements(
            self.members, types, dict(self._ways), tuple(self._together), tuple(self._reductions)
        )

    def add(self, turn: Turn, found: Found) -> str:
        """Note what a turn found.

        Returns:
            A line about it.
        """
        said = {"pair": self._add_pairs, "together": self._add_flows}.get(turn.kind, self._add_sums)
        line = said(turn, found)
        self.turns_done += 1
        return line

    def _ends(self, flow: Flow) -> Ends:
        source, target = flow
        return self.members[source].name, self.members[target].name

    def _add_pairs(self, turn: Turn, found: Found) -> str:
        said = []
        for first, second in turn.flows:
            for source, target in ((first, second), (second, first)):
                samples = {int(key): row for key, row in found[source][str(target)].items()}
                said.append(self._add_way(self._ends((source, target)), samples))
        return "; ".join(said)

    def _add_way(self, ends: Ends, samples: Mapping[int, Sequence[float]]) -> str:
        try:
            way = self._ways[ends] = fit_one_way(*ends, samples, self._of_equal)
        except PipeplanError as error:
            self.notes += error.problems
            return error.problems[0]
        return (
            f"{ends[0]} > {ends[1]}: {format_seconds(way.latency_s)}, "
            f"{way.bandwidth_gb_per_s:.4g} GB/s"
        )

    def _add_flows(self, turn: Turn, found: Found) -> str:
        rows = [found[target][str(source)] for source, target in turn.flows]
        row = Together(
            turn.shows,
            tuple(self._ends(flow) for flow in turn.flows),
            tuple(bytes_ for bytes_, _ in rows),
            tuple(median(spans) for _, spans in rows),
        )
        self._together.append(row)
        flows = ", ".join(
            f"{a} > {b} {rate:.4g} GB/s"
            for (a, b), rate in zip(row.flows, row.rates_gb_per_s, strict=True)
        )
        return f"at the same time ({turn.shows}): {flows}"

    def _add_sums(self, turn: Turn, found: Found) -> str:
        devices = tuple(self.members[rank].name for rank in turn.group)
        said = []
        for key in found[turn.group[0]]:
            # It is over when the last rank has it.
            columns = zip(*(found[rank][key] for rank in turn.group), strict=True)
            seconds = self._of_equal([max(column) for column in columns])
            self._reductions.append(Reduction(devices, int(key), seconds))
            said.append(f"{int(key):,} bytes {format_seconds(seconds)}")
        return f"all-reduce among {plural(len(devices), 'rank')}: {', '.join(said)}"
