"""The placement as a CP-SAT model: for free stages, and where there are too many ideals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from ortools.sat.python import cp_model

from benchmarks.placement.solver.blocks import Blocks, Net
from benchmarks.placement.solver.bounds import crowded_blocks

MOST_COVERS = 12


class PlacementModel:
    """Variables and rules.

    Attributes:
        model: the CP-SAT model; add constraints of your own to it.
        on: ``on[block][device]``, whether a block is on a device.
        load: the largest load in steps, minimised.

    Args:
        blocks: the problem; with precedences the devices are stages in order, and a stage's class
            is a decision.
        lower: no load below this is possible.
        most: only placements with loads up to this are looked for.
        order: which of the placements that differ by the names of like devices is kept: by the
            longest blocks (the i-th of them on one of the first i devices), or by how many of the
            blocks they hold that are too many for the devices (:func:`crowded_blocks`). The first
            is better as a rule, the second where blocks are much alike.
    """

    def __init__(
        self, blocks: Blocks, lower: int, most: int, order: Literal["longest", "crowd"] = "longest"
    ) -> None:
        self.model = cp_model.CpModel()
        self._blocks = blocks
        self._order = order
        self._is_ordered = bool(blocks.precedences)
        self.load = self.model.new_int_var(lower, most, "largest load")
        count = sum(kind.count for kind in blocks.classes)
        self.on = [
            [self.model.new_bool_var(f"on[{block},{device}]") for device in range(count)]
            for block in range(blocks.size)
        ]
        self.is_class = self._class_literals(count)
        self._touches: dict[tuple[int, int], cp_model.IntVar] = {}
        self._add_constraints(most)
        self.model.minimize(self.load)

    def _class_literals(self, count: int) -> list[list[cp_model.IntVar | bool]]:
        """Return literals for the class of a device: fixed, or decisions if devices are stages."""
        kinds = [n for n, kind in enumerate(self._blocks.classes) for _ in range(kind.count)]
        classes = range(len(self._blocks.classes))
        if not self._is_ordered or len(set(kinds)) == 1:
            return [[kind == number for number in classes] for kind in kinds]
        return [
            [self.model.new_bool_var(f"class[{device},{number}]") for number in classes]
            for device in range(count)
        ]

    def _add_constraints(self, most: int) -> None:
        for row in self.on:
            self.model.add_exactly_one(row)
        self._add_classes()
        self._add_order()
        self._add_transfers()
        self._add_devices()
        if not self._is_ordered:
            self._add_covers(most)
            self._add_symmetry()

    def _add_classes(self) -> None:
        for device, row in enumerate(self.is_class):
            for number, literal in enumerate(row):
                if literal is False:
                    continue
                for block, may in enumerate(self._blocks.allowed[number]):
                    if not may:
                        self.model.add(self.on[block][device] == 0).only_enforce_if(literal)
            if not isinstance(row[0], bool):
                self.model.add_exactly_one(row)
        if not isinstance(self.is_class[0][0], bool):
            for number, kind in enumerate(self._blocks.classes):
                self.model.add(sum(row[number] for row in self.is_class) == kind.count)

    def _add_order(self) -> None:
        """A block's stage is not before that of what it needs; ``by[k]``: in stage k or before."""
        if not self._is_ordered:
            return
        by = []
        for row in self.on:
            reached = [self.model.new_bool_var("") for _ in row]
            self.model.add(reached[0] == row[0])
            self.model.add(reached[-1] == 1)
            for device in range(1, len(row)):
                self.model.add(reached[device] == reached[device - 1] + row[device])
            by.append(reached)
        for before, after in sorted(self._blocks.precedences):
            for early, late in zip(by[before], by[after], strict=True):
                self.model.add_implication(late, early)

    def _add_transfers(self) -> None:
        """A device pays for a net unless it holds none or all of its pins."""
        for number, net in enumerate(self._blocks.nets):
            for device in range(len(self.is_class)):
                if self._may_pay(device):
                    self._touches[number, device] = self._touch(net, device)

    def _may_pay(self, device: int) -> bool:
        return any(
            literal is not False and kind.pays_transfers
            for literal, kind in zip(self.is_class[device], self._blocks.classes, strict=True)
        )

    def _touch(self, net: Net, device: int) -> cp_model.IntVar:
        touch = self.model.new_bool_var("")
        first = self.on[net.pins[0]][device]
        for pin in net.pins[1:]:
            other = self.on[pin][device]
            self.model.add_bool_or(touch, ~first, other)
            self.model.add_bool_or(touch, first, ~other)
        return touch

    def _add_devices(self) -> None:
        for device, row in enumerate(self.is_class):
            for number, literal in enumerate(row):
                if literal is not False:
                    self.model.add(self._load(device, number) <= self.load).only_enforce_if(literal)
                    if any(self._blocks.memory):
                        held = sum(
                            size * on[device]
                            for size, on in zip(self._blocks.memory, self.on, strict=True)
                        )
                        limit = self._blocks.limits[number]
                        self.model.add(held <= limit).only_enforce_if(literal)

    def _load(self, device: int, number: int) -> cp_model.LinearExpr:
        times = self._blocks.times[number]
        terms = [(on[device], time) for on, time in zip(self.on, times, strict=True) if time]
        if self._blocks.classes[number].pays_transfers:
            terms += [
                (self._touches[net, device], self._blocks.nets[net].cost)
                for net in range(len(self._blocks.nets))
            ]
        return cp_model.LinearExpr.weighted_sum([t[0] for t in terms], [t[1] for t in terms])

    def _add_covers(self, most: int) -> None:
        """At most k of the blocks of which k + 1 are too many for a device, whichever they are."""
        for device, row in enumerate(self.is_class):
            times = self._blocks.times[row.index(True)]
            for k in range(1, MOST_COVERS):
                large = [b for b, time in enumerate(times) if (k + 1) * time > most]
                if len(large) > k:
                    self.model.add(sum(self.on[block][device] for block in large) <= k)

    def _add_symmetry(self) -> None:
        """Devices of one class are alike: choose between placements that differ by their names."""
        kinds = [row.index(True) for row in self.is_class]
        if self._order == "crowd":
            _, crowd = crowded_blocks(self._blocks)
            for device, (kind, following) in enumerate(pairwise(kinds)):
                if kind == following:
                    held = [sum(self.on[b][d] for b in crowd) for d in (device, device + 1)]
                    self.model.add(held[0] >= held[1])
            return
        for number in set(kinds):
            devices = [device for device, kind in enumerate(kinds) if kind == number]
            for rank, block in enumerate(_longest_first(self._blocks)[: len(devices)]):
                for device in devices[rank + 1 :]:
                    self.model.add(self.on[block][device] == 0)

    def _renamed(self, devices: Sequence[int], classes: Sequence[int]) -> list[int]:
        """A placement under the names that :meth:`_add_symmetry` allows."""
        if self._order == "crowd":
            _, crowd = crowded_blocks(self._blocks)
            held = Counter(devices[block] for block in crowd)
            ranks = {device: -held[device] for device in range(len(classes))}
        else:
            longest = _longest_first(self._blocks)
            first = {devices[block]: rank for rank, block in reversed(list(enumerate(longest)))}
            ranks = {device: first.get(device, len(longest)) for device in range(len(classes))}
        order = sorted(ranks, key=lambda device: (classes[device], ranks[device], device))
        new = {old: position for position, old in enumerate(order)}
        return [new[device] for device in devices]

    def hint(self, devices: Sequence[int], classes: Sequence[int]) -> None:
        """Suggest a placement: the device of every block, the class of every device."""
        if not self._is_ordered:
            devices = self._renamed(devices, classes)
        for on, chosen in zip(self.on, devices, strict=True):
            for device, here in enumerate(on):
                self.model.add_hint(here, device == chosen)
        for device, row in enumerate(self.is_class):
            for number, literal in enumerate(row):
                if not isinstance(literal, bool):
                    self.model.add_hint(literal, classes[device] == number)
        for (net, device), touch in self._touches.items():
            inside = [devices[pin] == device for pin in self._blocks.nets[net].pins]
            self.model.add_hint(touch, any(inside) and not all(inside))


def _longest_first(blocks: Blocks) -> list[int]:
    times = [min(column) for column in zip(*blocks.times, strict=True)]
    return sorted(range(blocks.size), key=lambda block: -times[block])
