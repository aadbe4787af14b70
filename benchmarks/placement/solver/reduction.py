"""Blocks that share a device in every better placement are joined."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.placement.solver.blocks import Blocks, Net
from benchmarks.placement.solver.bounds import best_prices


def joined_below(blocks: Blocks, most: int) -> Blocks:
    """Join blocks that every placement with loads up to ``most`` keeps together.

    A net is never cut if that would overload its devices, or if it costs more than all devices
    together have to spare. No placement with loads up to ``most`` is lost, and none is new.
    """
    while True:
        limit = _Limit(blocks, most)
        pairs = [
            (net.pins[0], pin)
            for net in blocks.nets
            if limit.forbids_cutting(net)
            for pin in net.pins[1:]
        ]
        if not pairs:
            return blocks
        blocks = blocks.joined(pairs)


class _Limit:
    """The room that loads up to a limit leave."""

    def __init__(self, blocks: Blocks, most: int) -> None:
        self._blocks, self._most = blocks, most
        self._prices = best_prices(blocks)
        counts = tuple(kind.count for kind in blocks.classes)
        self._spare = self._prices.budget(counts, most) - sum(map(int, self._prices.weights))
        paying = [number for number in self._present if blocks.classes[number].pays_transfers]
        self._paying = paying
        self._free = [number for number in self._present if number not in paying]
        self._price = min((self._prices.of_class[number] for number in paying), default=0)

    @property
    def _present(self) -> list[int]:
        return [number for number, kind in enumerate(self._blocks.classes) if kind.count]

    def forbids_cutting(self, net: Net) -> bool:
        """Return whether every cut of a net overloads a device, or all of them together.

        Cut, its pins are on at least two devices; those on a device that pays come with its cost.
        """
        fits_paying = [self._fits_paying(pin, net.cost) for pin in net.pins]
        extra_free = [self._extra_if_free(pin) for pin in net.pins]
        if any(
            not fits and extra is None for fits, extra in zip(fits_paying, extra_free, strict=True)
        ):
            return True
        free_devices = sum(self._blocks.classes[number].count for number in self._free)
        if free_devices <= 1 and not any(fits_paying):
            return True
        return self._least_paid(net, free_devices, extra_free) > self._spare

    def _least_paid(self, net: Net, free_devices: int, extra_free: list[int | None]) -> int:
        """The least that all devices together pay more if a net is cut, in prices."""
        ways = [2 * net.cost * self._price]
        extras = sorted(extra for extra in extra_free if extra is not None)
        if extras:
            ways.append(net.cost * self._price + extras[0])
        if free_devices > 1 and len(extras) == len(net.pins):
            ways.append(sum(extras))
        return min(ways)

    def _fits_paying(self, pin: int, cost: int) -> bool:
        blocks = self._blocks
        return any(
            blocks.allowed[number][pin] and blocks.times[number][pin] + cost <= self._most
            for number in self._paying
        )

    def _extra_if_free(self, pin: int) -> int | None:
        """Return a pin's extra cost on classes with free transfers; None if it does not fit."""
        blocks = self._blocks
        costs = [
            self._prices.of_class[number] * blocks.times[number][pin]
            for number in self._free
            if blocks.allowed[number][pin] and blocks.times[number][pin] <= self._most
        ]
        return min(costs) - int(self._prices.weights[pin]) if costs else None


def joined_followers(blocks: Blocks, most: int) -> Blocks:
    """The blocks with each joined to a neighbour that it can always follow.

    Let a net of cost c between two blocks alone be cut. Moving the first block to the device of
    the second saves c there and c where it was; it adds the first block's time there, and the
    first block's other nets at most once on each of the two. If that is no gain for either device,
    whatever the class of the second's, some best placement has the two together. Where stages are
    ordered, the second must also be the only block that the first must not come after, or before.
    Used only where memory cannot bind.
    """
    while not any(blocks.memory):
        pairs = list(_followers(blocks, most))
        if not pairs:
            break
        blocks = blocks.joined(pairs)
    return blocks


def _followers(blocks: Blocks, most: int) -> Iterator[tuple[int, int]]:
    """Pairs that have no net and no precedence in common, so that all can be joined at once."""
    touched: set[int] = set()
    for block in range(blocks.size):
        around = _around(blocks, block)
        other = _leader(blocks, block, most) if touched.isdisjoint(around) else None
        if other is not None:
            touched |= around | _around(blocks, other)
            yield block, other


def _around(blocks: Blocks, block: int) -> set[int]:
    pins = {pin for number in blocks.nets_of[block] for pin in blocks.nets[number].pins}
    return {block, *pins, *blocks.predecessors[block], *blocks.successors[block]}


def _leader(blocks: Blocks, block: int, most: int) -> int | None:
    """A block that this one can always follow, or None."""
    nets = [blocks.nets[number] for number in blocks.nets_of[block]]
    total = sum(net.cost for net in nets)
    for net in nets:
        if len(net.pins) == 2:
            other = net.pins[0] if net.pins[1] == block else net.pins[1]
            gain = net.cost - (total - net.cost)
            if _gains_anywhere(blocks, block, other, gain, most) and _is_end_of(
                blocks, block, other
            ):
                return other
    return None


def _gains_anywhere(blocks: Blocks, block: int, other: int, gain: int, most: int) -> bool:
    """Return whether joining is no loss on any class that can hold the other block."""
    if gain < 0:
        return False
    return all(
        allowed[block] and times[block] <= (gain if kind.pays_transfers else 0)
        for kind, times, allowed in zip(blocks.classes, blocks.times, blocks.allowed, strict=True)
        if kind.count and allowed[other] and times[other] <= most
    )


def _is_end_of(blocks: Blocks, block: int, other: int) -> bool:
    """Return whether a block is another's only predecessor or only successor."""
    if not blocks.precedences:
        return True
    return {other} in (set(blocks.predecessors[block]), set(blocks.successors[block]))
