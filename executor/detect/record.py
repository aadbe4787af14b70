"""What the turns of a measurement found, and the devices that they were of."""

from __future__ import annotations

import re
import socket
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from executor.detect.compute import BESIDE_S, FEWEST_ROUNDS, slowdowns
from executor.detect.turns import Flow, Turn
from planner.cluster.device_types import KnownType, cpu_type, gpu_type
from planner.cluster.hardware import GIB, DeviceType
from planner.cluster.merge import NETWORK
from planner.errors import PipeplanError
from planner.topology.measurements import (
    Beside,
    ConcurrentMessages,
    Ends,
    MeasuredRank,
    Measurements,
    OfEqual,
    OneWay,
    Slowed,
    TimedReduction,
    fit_one_way,
)
from planner.units import format_seconds, plural

Found = Mapping[int, Any]
"""What each rank said of a turn, as plain JSON values."""


class MeasurementRecord:
    """Grows turn by turn.

    Args:
        members: devices by rank.
        types: of devices, by name.
        of_equal: what counts of equal messages and all-reduces.
    """

    def __init__(
        self,
        members: Sequence[MeasuredRank],
        types: Mapping[str, KnownType],
        of_equal: OfEqual = median,
    ) -> None:
        self._of_equal = of_equal
        self.members = tuple(members)
        self.types = dict(types)
        self.turns_done = 0
        self._ways: dict[Ends, OneWay] = {}
        self._together: list[ConcurrentMessages] = []
        self._reductions: list[TimedReduction] = []
        self._slower: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._alone_s: dict[str, float] = {}
        # By type, of each round how many times as long a block and messages take at once.
        self._ratios: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.notes: list[str] = [known.note for known in types.values() if known.note]

    @property
    def measurements(self) -> Measurements:
        """Return the results so far."""
        types = {name: self._slowed(name) for name in self.types}
        ranks = Counter(member.host for member in self.members)
        return Measurements(
            self.members,
            types,
            dict(self._ways),
            tuple(self._together),
            tuple(self._reductions),
            {
                host: slowdowns(ratios, ranks[host])
                for host, ratios in self._slower.items()
                if ranks[host] in ratios
            },
            self._beside,
        )

    def add(self, turn: Turn, found: Found) -> str:
        """Note what a turn found, and return a line about it."""
        self.turns_done += 1
        match turn.kind:
            case "compute":
                return self._add_computation(turn, found)
            case "pair":
                return self._add_pair(turn, found)
            case "beside":
                return self._add_beside(turn, found)
            case "together":
                return self._add_flows(turn, found)
            case "all-reduce":
                return self._add_sums(turn, found)

    def _ends(self, flow: Flow) -> Ends:
        source, target = flow
        return self.members[source].name, self.members[target].name

    def _add_computation(self, turn: Turn, found: Found) -> str:
        first = self.members[turn.group[0]]
        of_first = found[turn.group[0]]
        if len(turn.group) == 1:
            block_s = of_first["block_s"]
            figures = DeviceType.parse(of_first["figures"], "measured device")
            self._set_type(first, KnownType(first.type, figures), block_s)
            self._slower[first.host][1] = 1.0
            return f"{first.host}: 1 rank computing: a block takes {block_s * 1e3:.2f} ms"
        rounds = zip(*(found[rank]["block_s"] for rank in turn.group), strict=True)
        ratios = [
            fmean(of_all) / alone_s
            for of_all, alone_s in zip(rounds, of_first["alone_s"], strict=True)
        ]
        ratio = self._slower[first.host][len(turn.group)] = median(ratios)
        return (
            f"{first.host}: {plural(len(turn.group), 'rank')} computing: a block takes {ratio:.3f} "
            f"times as long as alone ({min(ratios):.3f} to {max(ratios):.3f})"
        )

    def _add_beside(self, turn: Turn, found: Found) -> str:
        """Note factors by type; of several hosts with devices of a type their rounds together."""
        member = self.members[turn.group[0]]
        ratios = [(block, message) for block, message in found[turn.group[0]]]
        if len(ratios) < FEWEST_ROUNDS:
            return (
                f"{member.name}: what messages and computation slow each other by is not known; "
                f"in a round of {BESIDE_S} s fewer than three exchanges were over"
            )
        self._ratios[member.type] += ratios
        return f"{member.name}: {_beside(ratios)}"

    def _slowed(self, name: str) -> DeviceType:
        """Return the figures of a type with the slow-downs that were measured, if they were."""
        figures, row = self.types[name].figures, self._beside.get(name)
        if row is None:
            return figures
        factors = {
            "compute_slowdown_while_communicating": row.computation.factor,
            "communication_slowdown_while_computing": row.messages.factor,
        }
        return figures.model_copy(update={key: f for key, f in factors.items() if f is not None})

    @property
    def _beside(self) -> dict[str, Beside]:
        return {name: _beside(ratios) for name, ratios in self._ratios.items()}

    def _set_type(self, measured: MeasuredRank, known: KnownType, alone_s: float) -> None:
        """Give a host's ranks the figures of one; other processors or speeds are another type."""
        name, number = known.name, 1
        while name in self._alone_s and not (
            self.types[name].figures.hardware == known.figures.hardware
            and abs(alone_s / self._alone_s[name] - 1) <= SAME_SPEED
        ):
            number += 1
            name = f"{known.name}-{number}"
        if name not in self._alone_s:
            self._alone_s[name] = alone_s
            self.types[name] = KnownType(name, known.figures)
        self.members = tuple(
            replace(member, type=name)
            if (member.host, member.type) == (measured.host, measured.type)
            else member
            for member in self.members
        )

    def _add_pair(self, turn: Turn, found: Found) -> str:
        ((first, second),) = turn.flows
        return "; ".join(
            self._add_way(self._ends((source, target)), found[source])
            for source, target in ((first, second), (second, first))
        )

    def _add_way(self, ends: Ends, samples: Mapping[str, Sequence[float]]) -> str:
        seconds = {int(bytes_): row for bytes_, row in samples.items()}
        try:
            way = self._ways[ends] = fit_one_way(*ends, seconds, self._of_equal)
        except PipeplanError as error:
            self.notes += error.problems
            return error.problems[0]
        rate = f"{way.bandwidth_gb_per_s:.4g} GB/s"
        return f"{ends[0]} > {ends[1]}: {format_seconds(way.latency_s)}, {rate}"

    def _add_flows(self, turn: Turn, found: Found) -> str:
        rows = [found[target][str(source)] for source, target in turn.flows]
        row = ConcurrentMessages(
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
            self._reductions.append(TimedReduction(devices, int(key), seconds))
            said.append(f"{int(key):,} bytes {format_seconds(seconds)}")
        return f"all-reduce among {plural(len(devices), 'rank')}: {', '.join(said)}"


def _beside(ratios: Sequence[tuple[float, float]]) -> Beside:
    computation, messages = zip(*ratios, strict=True)
    return Beside(Slowed.of(computation), Slowed.of(messages))


SAME_SPEED = 0.1
"""Ranks of one type on other hosts count as alike if a block's times differ by no larger share."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:-]+")
_MOST_CHARACTERS = 90
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def about_this_rank(device: torch.device, host: str | None) -> dict[str, Any]:
    """Plain JSON values for the other ranks.

    Args:
        device: of this rank.
        host: as the user calls the machine; None for the machine's own name.
    """
    boot = ""
    if host is None:
        # Two machines may bear one name, such as localhost.
        with suppress(OSError):
            boot = _BOOT.read_text().strip()
    about: dict[str, Any] = {"host": host or socket.gethostname(), "boot": boot, "gpu": None}
    if device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
        about["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / GIB
    return about


def members_of(
    abouts: Sequence[Mapping[str, Any]],
) -> tuple[tuple[MeasuredRank, ...], dict[str, KnownType]]:
    """Devices by rank, and their types by name."""
    hosts = _host_names([(about["host"], about["boot"]) for about in abouts])
    types: dict[str, KnownType] = {}
    members = []
    places: Counter[tuple[str, str]] = Counter()
    for host, about in zip(hosts, abouts, strict=True):
        gpu = about["gpu"]
        known = cpu_type() if gpu is None else gpu_type(gpu, about["memory_gib"])
        kind = "cpu" if gpu is None else "gpu"
        name = f"{host}/{kind}{places[host, kind]}"
        places[host, kind] += 1
        types.setdefault(known.name, known)
        members.append(MeasuredRank(name, host, known.name))
    return tuple(members), types


def _host_names(machines: Sequence[tuple[str, str]]) -> list[str]:
    """One name for each machine, of characters that a cluster file takes."""
    named: dict[tuple[str, str], str] = {}
    for machine in machines:
        if machine in named:
            continue
        plain = _NOT_IN_NAMES.sub("-", machine[0])[:_MOST_CHARACTERS].strip("-") or "host"
        taken = {*named.values(), NETWORK}
        name, number = plain, 2
        while name in taken:
            name, number = f"{plain}-{number}", number + 1
        named[machine] = name
    return [named[machine] for machine in machines]
