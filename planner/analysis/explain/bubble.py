"""The bubble by cause: where the idle time of the devices comes from.

Two views, each of which sums to the whole idle time of every device.

*What was waited for* is read off the replay: whatever ends an idle interval waited for a chain of
events without a gap (see ``critical_path``), so at every moment of the interval one event elsewhere
was waited for. Look at it in the trace at that moment.

*Causes* follow from comparing a device with the busiest one. What a device has less to do than the
busiest is imbalance: no schedule of these stages lets it work meanwhile. The rest it idles for the
reason for which even the busiest device does, and that has no imbalance to wait for: its own waits
say whether computation elsewhere (fill, drain and the order of microbatches), transfers, or
all-reduces and optimizer steps keep it. Waits alone would not do as causes: a device of little work
waits for a message in the end, whatever made it wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.analysis.explain.path_shares import Cause, Spent, spent_on
from planner.simulation.critical_path import Causes
from planner.simulation.timeline import Event, OperationEvent, OptimizerEvent, Timeline

WAITED_FOR: Mapping[str, tuple[Cause, ...]] = {
    "fill_and_drain_s": ("computation",),
    "transfers_s": ("transfers", "offload"),
    "synchronisation_s": ("all-reduce", "all-gather", "optimizer"),
}
"""What a device waits for, by the field of :class:`IdleTime` that it counts as."""
CAUSES = ("imbalance_s", *WAITED_FOR)
"""Fields of :class:`IdleTime` that sum to its ``idle_s``."""


class Waited(NamedTuple):
    """A cause that a device waited for while it was idle, and for how many seconds."""

    spent: Spent
    seconds: float


@dataclass(frozen=True)
class IdleTime:
    """One device's idle time by cause; seconds that sum to ``idle_s``.

    Attributes:
        device: its name.
        idle_s: the iteration less its operations and its optimizer step.
        imbalance_s: what it has less to do than the busiest device.
        fill_and_drain_s: even the busiest device waits so long for computation elsewhere.
        transfers_s: the same for transfers, and for stashes copied to the host and back.
        synchronisation_s: even the busiest device waits so long for all-reduces, all-gathers and
            the optimizer steps of others.
        waited_for: what ran elsewhere while this device itself waited for it, the longest first;
            it sums to ``idle_s`` too.
    """

    device: str
    idle_s: float
    imbalance_s: float
    fill_and_drain_s: float
    transfers_s: float
    synchronisation_s: float
    waited_for: tuple[Waited, ...]


@dataclass(frozen=True)
class Bubble:
    """The idle time of all devices in use.

    Attributes:
        busiest: the device with most operations and optimizer step.
        devices: in stage order.
        iteration_time_s: of which each device is idle for its share.
    """

    busiest: str
    devices: tuple[IdleTime, ...]
    iteration_time_s: float

    @property
    def idle_s(self) -> float:
        """Idle seconds of all devices together."""
        return sum(row.idle_s for row in self.devices)

    @property
    def share(self) -> float:
        """Idle share of the devices' time: the plan's ``bubble``."""
        whole_s = len(self.devices) * self.iteration_time_s
        return self.idle_s / whole_s if whole_s > 0 else 0.0

    def cause_s(self, name: str) -> float:
        """Return seconds of a cause, one of :data:`CAUSES`, over all devices."""
        return float(sum(getattr(row, name) for row in self.devices))


def bubble_by_cause(timeline: Timeline) -> Bubble:
    """Divide the idle time of every device of a replay."""
    waits, busy_s = _Waits(timeline), timeline.busy_s
    rows = {device: waits.of(device) for device in timeline.pipeline.devices}
    busiest = max(rows, key=lambda device: busy_s[device])
    shared = {cause: waited_s(rows[busiest], cause) for cause in WAITED_FOR}
    devices = (
        IdleTime(
            device=device,
            idle_s=timeline.iteration_time_s - busy_s[device],
            imbalance_s=busy_s[busiest] - busy_s[device],
            waited_for=waited,
            **shared,
        )
        for device, waited in rows.items()
    )
    return Bubble(busiest, tuple(devices), timeline.iteration_time_s)


def waited_s(waits: Iterable[Waited], cause: str) -> float:
    """Return the seconds of waits that count as a cause, one of :data:`WAITED_FOR`."""
    return sum(row.seconds for row in waits if row.spent.cause in WAITED_FOR[cause])


class _Waits:
    """The causes that each device of a timeline waits for while it is idle."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._causes = timeline, Causes(timeline)
        self._path = self._causes.chain(self._causes.last_event())
        self._runs: dict[str, list[Event]] = {device: [] for device in timeline.pipeline.devices}
        events: Iterable[OperationEvent | OptimizerEvent] = (*timeline.operations, *timeline.steps)
        for event in events:
            self._runs[event.device].append(event)

    def of(self, device: str) -> tuple[Waited, ...]:
        """Return what a device waits for, the longest wait first."""
        seconds: defaultdict[Spent, float] = defaultdict(float)
        for event, length_s in self._pieces(device):
            seconds[spent_on(self._timeline.pipeline, event)] += length_s
        ranked = sorted(seconds.items(), key=lambda row: (-row[1], row[0]))
        return tuple(Waited(spent, found_s) for spent, found_s in ranked)

    def _pieces(self, device: str) -> Iterator[tuple[Event, float]]:
        """Yield events elsewhere that cover the idle time, each with the seconds of it."""
        free_s = 0.0
        for event in self._runs[device]:
            if event.start_s > free_s:
                chain = self._causes.chain(event, free_s)[:-1]
                yield from _covered(chain, free_s, event.start_s)
            free_s = event.end_s
        yield from _covered(self._path, free_s, self._timeline.iteration_time_s)


def _covered(chain: Sequence[Event], begin_s: float, end_s: float) -> Iterator[tuple[Event, float]]:
    """Yield the parts of a chain's events, the latest first, inside an interval."""
    for event in reversed(chain):
        if event.end_s <= begin_s:
            return
        length_s = min(event.end_s, end_s) - max(event.start_s, begin_s)
        if length_s > 0:
            yield event, length_s
