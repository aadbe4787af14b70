"""Where devices and switches stand in the picture of a cluster.

A device whose only switch is S stands in the card of S; what is left, switches and devices between
several of them, is laid out by networkx: as a tree from its centre, left to right, where it is one,
else by forces. Lengths are CSS pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from planner.artifacts.cluster import Cluster

CELL_WIDTH, CELL_HEIGHT, CELL_GAP = 74.0, 34.0, 6.0
HEAD_HEIGHT, PADDING, FOOT = 34.0, 8.0, 20.0
LEAST_WIDTH = 150.0
MOST_COLUMNS = 8
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
        """Whether it stands for a switch."""
        return self.devices != (self.name,)

    @property
    def head(self) -> float:
        """Height above the cells."""
        return HEAD_HEIGHT if self.is_switch else 0.0

    @property
    def width(self) -> float:
        """Of the whole card."""
        cells = self.columns * (CELL_WIDTH + CELL_GAP) - CELL_GAP + 2 * PADDING
        return max(cells, LEAST_WIDTH) if self.is_switch else cells

    @property
    def height(self) -> float:
        """Of the whole card."""
        rows = -(-len(self.devices) // self.columns)
        below = rows * (CELL_HEIGHT + CELL_GAP) - CELL_GAP + PADDING if rows else 0.0
        return self.head + below + self.foot + (0.0 if self.is_switch else PADDING)

    def cell(self, place: int) -> tuple[float, float]:
        """The upper left corner of a device's cell."""
        row, column = divmod(place, self.columns)
        return (
            self.x + PADDING + column * (CELL_WIDTH + CELL_GAP),
            self.y + (self.head or PADDING) + row * (CELL_HEIGHT + CELL_GAP),
        )

    def at(self, x: float, y: float) -> Card:
        """The same card with another corner, on whole pixels."""
        return replace(self, x=float(round(x)), y=float(round(y)))


def layout(cluster: Cluster) -> dict[str, Card]:
    """Cards by name, placed; none lies on another. The same cluster gives the same picture."""
    cards = _cards(cluster)
    core = nx.Graph()
    core.add_nodes_from(cards)
    core.add_edges_from(
        link.between for link in cluster.links if all(end in cards for end in link.between)
    )
    return _as_forest(core, cards) if nx.is_forest(core) else _by_forces(core, cards)


def _cards(cluster: Cluster) -> dict[str, Card]:
    switches = set(cluster.switches)
    home = {}
    for device in cluster.device_names:
        near = {end for end in cluster.graph[device] if end in switches}
        if len(near) == 1:
            home[device] = near.pop()
    rows: dict[str, list[str]] = {switch: [] for switch in cluster.switches}
    for device, switch in home.items():
        rows[switch].append(device)
    alone = {device: [device] for device in cluster.device_names if device not in home}
    joined = {home[a] for a, b in (link.between for link in cluster.links) if _share(home, a, b)}
    return {
        name: Card(name, tuple(devices), _columns(len(devices)), FOOT if name in joined else 0.0)
        for name, devices in {**rows, **alone}.items()
    }


def _share(home: Mapping[str, str], first: str, second: str) -> bool:
    """Whether two devices stand in the same card."""
    return first in home and home[first] == home.get(second)


def _columns(count: int) -> int:
    """Few devices in one row, more of them in a block that is wider than high."""
    if count <= 4:
        return max(1, count)
    return min(MOST_COLUMNS, math.ceil(math.sqrt(2 * count)))


# --- trees ----------------------------------------------------------------------------------------


def _as_forest(core: nx.Graph, cards: Mapping[str, Card]) -> dict[str, Card]:
    """Each tree from its centre, below the one before."""
    placed: dict[str, Card] = {}
    top = 0.0
    for part in nx.connected_components(core):
        # A view of a part lists its vertices in an order that differs from run to run.
        tree = nx.Graph()
        tree.add_nodes_from(name for name in core if name in part)
        tree.add_edges_from(edge for edge in core.edges if edge[0] in part)
        top = _place_tree(tree, nx.center(tree)[0], cards, placed, top)
    return {name: placed[name] for name in cards}


def _place_tree(
    tree: nx.Graph, root: str, cards: Mapping[str, Card], placed: dict[str, Card], top: float
) -> float:
    """Leaves one below the other, every other vertex at the middle of its children.

    Returns:
        The upper end of what comes next.
    """
    lefts = _lefts(tree, root, cards)
    starts: dict[str, float] = {}
    for parent, name, step in nx.dfs_labeled_edges(tree, root):
        if step == "forward":
            starts[name] = top
        elif step == "reverse":
            card = cards[name]
            children = [placed[child] for child in tree[name] if child in placed]
            middles = [child.y + child.height / 2 for child in children if child.x > lefts[name]]
            wanted = sum(middles) / len(middles) - card.height / 2 if middles else top
            placed[name] = card.at(lefts[name], max(wanted, starts[name]))
            top = max(top, placed[name].y + card.height + _BETWEEN_ROWS)
    return top


def _lefts(tree: nx.Graph, root: str, cards: Mapping[str, Card]) -> dict[str, float]:
    """The left edge of each vertex: that of its column."""
    lefts: dict[str, float] = {}
    left = 0.0
    for column in nx.bfs_layers(tree, root):
        lefts |= dict.fromkeys(column, left)
        left += max(cards[name].width for name in column) + _BETWEEN_COLUMNS
    return lefts


# --- all else -------------------------------------------------------------------------------------


def _by_forces(core: nx.Graph, cards: Mapping[str, Card]) -> dict[str, Card]:
    """By forces (Fruchterman and Reingold 1991), from a circle, drawn apart until nothing lies on
    anything else.
    """
    circle = nx.circular_layout(core)
    few = len(core) < _MOST_BY_FORCES
    points = nx.spring_layout(core, pos=circle, iterations=200, seed=0) if few else circle
    names = list(core)
    scale = _least_scale([cards[name] for name in names], [points[name] for name in names])
    lefts = {n: points[n][0] * scale - cards[n].width / 2 for n in names}
    tops = {n: points[n][1] * scale - cards[n].height / 2 for n in names}
    left, top = min(lefts.values()), min(tops.values())
    return {n: cards[n].at(lefts[n] - left, tops[n] - top) for n in cards}


def _least_scale(cards: Sequence[Card], points: Sequence[Sequence[float]]) -> float:
    """The least factor by which no two cards overlap, with room for a label between them."""
    scale = 1.0
    for i, (first, (x, y)) in enumerate(zip(cards, points, strict=True)):
        for second, (u, v) in zip(cards[:i], points[:i], strict=True):
            across = ((first.width + second.width) / 2 + _BETWEEN_COLUMNS) / max(abs(x - u), 1e-9)
            down = ((first.height + second.height) / 2 + _BETWEEN_ROWS) / max(abs(y - v), 1e-9)
            scale = max(scale, min(across, down))
    return scale
