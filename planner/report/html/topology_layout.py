"""Positions of devices and switches in the picture of a cluster.

A device whose only switch is S stands in the card of S. What is left, switches and devices between
several of them, is laid out with networkx: in columns from its centre where every link joins two
neighbouring columns, as in trees and in leaves below spines, else by forces. Lengths are CSS
pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from planner.cluster.cluster import Cluster

CELL_WIDTH, CELL_HEIGHT, CELL_GAP = 74.0, 34.0, 6.0
HEAD_HEIGHT, PADDING, FOOT = 34.0, 8.0, 20.0
LETTER_WIDTH, MOST_LETTERS = 7.5, 20
MOST_COLUMNS = 8
MOST_ARCS = 6
"""More links among the devices of a card are told in words."""
_BETWEEN_COLUMNS, _BETWEEN_ROWS = 110.0, 14.0
# From here on networkx would need scipy for a layout by forces.
_MOST_BY_FORCES = 500


@dataclass(frozen=True)
class Card:
    """A vertex of the picture: a switch with the devices that hang on it alone, or a device.

    Attributes:
        name: of the switch; of the device where it stands alone.
        devices: its cells, row by row.
        columns: of cells.
        foot: height below the cells, for the links among them.
        x, y: the upper left corner.
    """

    name: str
    devices: tuple[str, ...]
    columns: int
    foot: float = 0.0
    x: float = 0.0
    y: float = 0.0

    @property
    def is_switch(self) -> bool:
        """Whether it is a switch."""
        return self.devices != (self.name,)

    @property
    def head(self) -> float:
        """Height above the cells."""
        return HEAD_HEIGHT if self.is_switch else 0.0

    @property
    def width(self) -> float:
        """The width of the whole card."""
        cells = self.columns * (CELL_WIDTH + CELL_GAP) - CELL_GAP
        if not self.is_switch:
            return cells
        letters = min(len(self.name), MOST_LETTERS) if not self.devices else MOST_LETTERS
        return max(cells, letters * LETTER_WIDTH) + 2 * PADDING

    @property
    def height(self) -> float:
        """The height of the whole card."""
        rows = -(-len(self.devices) // self.columns)
        cells = rows * (CELL_HEIGHT + CELL_GAP) - CELL_GAP if rows else 0.0
        return self.head + cells + self.foot + (PADDING if self.is_switch and rows else 0.0)

    def cell(self, place: int) -> tuple[float, float]:
        """The upper left corner of a device's cell."""
        row, column = divmod(place, self.columns)
        return (
            self.x + (PADDING if self.is_switch else 0.0) + column * (CELL_WIDTH + CELL_GAP),
            self.y + self.head + row * (CELL_HEIGHT + CELL_GAP),
        )

    def at(self, x: float, y: float) -> Card:
        """Return the same card with another corner, on whole pixels."""
        return replace(self, x=float(round(x)), y=float(round(y)))


@dataclass(frozen=True)
class Layout:
    """Cards by name, placed; none lies on another. ``is_forest``: no link closes a circle."""

    cards: dict[str, Card]
    is_forest: bool


def layout(cluster: Cluster) -> Layout:
    """Place a cluster's cards; the same cluster gives the same picture.

    Parts that no link joins stand one below the other.
    """
    cards = _cards(cluster)
    core = nx.Graph()
    core.add_nodes_from(cards)
    core.add_edges_from(
        link.between for link in cluster.links if all(end in cards for end in link.between)
    )
    placed: dict[str, Card] = {}
    top = 0.0
    for names in nx.connected_components(core):
        part = _part(core, names)
        columns = _columns_of(part, cards)
        found = _in_columns(part, columns, cards) if columns else _by_forces(part, cards)
        left, above = min(card.x for card in found), min(card.y for card in found)
        placed |= {card.name: card.at(card.x - left, card.y - above + top) for card in found}
        top = max(placed[name].y + placed[name].height for name in names) + _BETWEEN_ROWS
    return Layout({name: placed[name] for name in cards}, nx.is_forest(core))


def _part(core: nx.Graph, names: set[str]) -> nx.Graph:
    """A part as a graph of its own: a view lists vertices in another order from run to run."""
    part = nx.Graph()
    part.add_nodes_from(name for name in core if name in names)
    part.add_edges_from(edge for edge in core.edges if edge[0] in names)
    return part


def _cards(cluster: Cluster) -> dict[str, Card]:
    switches = set(cluster.switches)
    switch_of = {}
    for device in cluster.device_names:
        near = {end for end in cluster.graph[device] if end in switches}
        if len(near) == 1:
            switch_of[device] = near.pop()
    rows: dict[str, list[str]] = {switch: [] for switch in cluster.switches}
    for device, switch in switch_of.items():
        rows[switch].append(device)
    alone = {device: [device] for device in cluster.device_names if device not in switch_of}
    among = Counter(
        switch_of[first]
        for first, second in {
            frozenset(link.between): link.between for link in cluster.links
        }.values()
        if first in switch_of and switch_of[first] == switch_of.get(second)
    )
    return {
        name: Card(
            name,
            tuple(devices),
            _cells_across(len(devices)),
            FOOT if 0 < among[name] <= MOST_ARCS else 0.0,
        )
        for name, devices in {**rows, **alone}.items()
    }


def _cells_across(count: int) -> int:
    """Few devices in one row, more of them in a block that is wider than high."""
    if count <= 4:
        return max(1, count)
    return min(MOST_COLUMNS, math.ceil(math.sqrt(2 * count)))


# --- in columns -----------------------------------------------------------------------------------


def _columns_of(part: nx.Graph, cards: Mapping[str, Card]) -> list[list[str]]:
    """Columns from left to right; none if a link would join two vertices of a column.

    A tree goes by the distance from its centre, all else by the distance from devices: what is
    farthest from them, such as spines, comes first.
    """
    if nx.is_tree(part):
        return [list(column) for column in nx.bfs_layers(part, nx.center(part)[0])]
    with_devices = [name for name in part if cards[name].devices]
    columns = [list(column) for column in nx.bfs_layers(part, with_devices)][::-1]
    number = {name: place for place, column in enumerate(columns) for name in column}
    across = all(number.get(first) != number.get(second) for first, second in part.edges)
    return columns if across else []


def _in_columns(
    part: nx.Graph, columns: Sequence[Sequence[str]], cards: Mapping[str, Card]
) -> list[Card]:
    """Place leaves below each other, and all else at the middle of what follows it."""
    number = {name: place for place, column in enumerate(columns) for name in column}
    after = {name: [n for n in part[name] if number[n] > number[name]] for name in part}
    roots = [name for name in part if all(number[n] > number[name] for n in part[name])]
    middles = _ends(roots, after, cards)
    tops: dict[str, float] = {}
    for column in reversed(columns):
        for name in column:
            if after[name]:
                middles[name] = sum(middles[n] for n in after[name]) / len(after[name])
        wanted = {name: middles[name] - cards[name].height / 2 for name in column}
        tops |= _apart(wanted, cards)
        middles |= {name: tops[name] + cards[name].height / 2 for name in column}
    left, placed = 0.0, []
    for column in columns:
        placed += [cards[name].at(left, tops[name]) for name in column]
        left += max(cards[name].width for name in column) + _BETWEEN_COLUMNS
    return placed


def _ends(
    roots: Sequence[str], after: Mapping[str, Sequence[str]], cards: Mapping[str, Card]
) -> dict[str, float]:
    """The middles of what ends a branch, in the order in which a walk from the roots meets it."""
    middles: dict[str, float] = {}
    top = 0.0
    waiting, seen = list(reversed(roots)), set(roots)
    while waiting:
        name = waiting.pop()
        if not after[name]:
            middles[name] = top + cards[name].height / 2
            top += cards[name].height + _BETWEEN_ROWS
        fresh = [n for n in after[name] if n not in seen]
        seen.update(fresh)
        waiting += reversed(fresh)
    return middles


def _apart(wanted: Mapping[str, float], cards: Mapping[str, Card]) -> dict[str, float]:
    """The upper ends of a column, pushed down until none overlap, then up by the mean push."""
    tops: dict[str, float] = {}
    least = -math.inf
    for name in sorted(wanted, key=lambda name: wanted[name]):
        tops[name] = max(wanted[name], least)
        least = tops[name] + cards[name].height + _BETWEEN_ROWS
    push = sum(tops[name] - wanted[name] for name in tops) / len(tops)
    return {name: top - push for name, top in tops.items()}


# --- all else -------------------------------------------------------------------------------------


def _by_forces(part: nx.Graph, cards: Mapping[str, Card]) -> list[Card]:
    """Place cards by forces (Fruchterman and Reingold 1991), then spread overlapping ones."""
    circle = nx.circular_layout(part)
    few = len(part) < _MOST_BY_FORCES
    points = nx.spring_layout(part, pos=circle, iterations=200, seed=0) if few else circle
    scale = _least_scale([cards[name] for name in part], [points[name] for name in part])
    return [
        card.at(scale * x - card.width / 2, scale * y - card.height / 2)
        for card, (x, y) in ((cards[name], points[name]) for name in part)
    ]


def _least_scale(cards: Sequence[Card], points: Sequence[Sequence[float]]) -> float:
    """The least factor by which no two cards overlap, with room for a label between them."""
    scale = 1.0
    for i, (first, (x, y)) in enumerate(zip(cards, points, strict=True)):
        for second, (u, v) in zip(cards[:i], points[:i], strict=True):
            across = ((first.width + second.width) / 2 + _BETWEEN_COLUMNS) / max(abs(x - u), 1e-9)
            down = ((first.height + second.height) / 2 + _BETWEEN_ROWS) / max(abs(y - v), 1e-9)
            scale = max(scale, min(across, down))
    return scale
