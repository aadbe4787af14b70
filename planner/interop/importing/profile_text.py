"""Reader of PipeDream and DAPPLE profiles: lines of nodes, then lines of edges.

``nodeK -- name -- forward_compute_time=…, backward_compute_time=…, activation_size=…,
parameter_size=…`` with milliseconds and bytes, then ``<tab>nodeA -- nodeB``. Syntax as written by
PipeDream's profiler (Narayanan et al. 2019, ``graph.txt``) and taken over by DAPPLE (Fan et al.
2021). What the published files do besides, and is read: lists as sizes (``[a; b]``), a fifth part
``stage_id=N``, spaces instead of the tab, edges between the nodes, repeated edges, no line end at
the end of the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx

from planner.errors import PipeplanError, shorten
from planner.units import plural

FORWARD, BACKWARD = "forward_compute_time", "backward_compute_time"
ACTIVATION, PARAMETERS = "activation_size", "parameter_size"
FIELDS = (FORWARD, BACKWARD, ACTIVATION, PARAMETERS)
EXAMPLE = f"node1 -- name -- {', '.join(f'{name}=0' for name in FIELDS)}"
MOST_MS = 1e8
"""Longest time of one layer: over a day, with FLOPs that can be counted on every device."""
MOST_BYTES = 1e14
"""Most bytes of one node, so that sums over ten thousand nodes fit into 64 bits."""
_FIELD = re.compile(r"\s*(\w+)\s*=\s*(\[[^\[\]]*\]|[^,\[\]]*)(?:,|$)")
_IDENTIFIER = re.compile(r"[\w./+#@-]{1,100}")
_SHOWN_OF_A_CYCLE = 8


@dataclass(frozen=True)
class ProfileNode:
    """One node line.

    Attributes:
        identifier: such as ``node4``.
        name: what it is, such as ``Linear(in_features=8, out_features=4)``.
        forward_ms, backward_ms: of one batch of the profile.
        activation_bytes: of each tensor it hands on; one element unless the file has a list.
        parameter_bytes: of its weights.
    """

    identifier: str
    name: str
    forward_ms: float
    backward_ms: float
    activation_bytes: tuple[int, ...]
    parameter_bytes: int


@dataclass(frozen=True)
class Profile:
    """A profile as it stands in the file.

    Attributes:
        nodes: by identifier, in file order.
        edges: without repetitions, in file order; they form no cycle.
        notes: what was read in another way than it is written, and what was not.
    """

    nodes: dict[str, ProfileNode]
    edges: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def parse_profile(text: str, source: str) -> Profile:
    """Read the text of a profile.

    Args:
        text: the file's contents.
        source: the name to use for it in messages.

    Raises:
        PipeplanError: naming line, field, value and remedy of everything that cannot be read.
    """
    draft = _Draft()
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            draft.read_line(number, line.strip())
    problems = draft.problems or list(_graph_problems(draft))
    if problems:
        raise PipeplanError(f"{source}: {problem}" for problem in problems)
    return Profile(draft.nodes, tuple(draft.edges), tuple(_notes(draft)))


@dataclass
class _Draft:
    """The part of the profile read so far: lines by node and by edge."""

    nodes: dict[str, ProfileNode] = field(default_factory=dict)
    node_lines: dict[str, int] = field(default_factory=dict)
    edges: dict[tuple[str, str], int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    repeated_edges: int = 0
    staged_nodes: int = 0
    fractional_sizes: int = 0
    other_fields: dict[str, int] = field(default_factory=dict)

    def read_line(self, number: int, line: str) -> None:
        """Read a node, an edge, or tell what is wrong with the line."""
        identifier, separator, rest = line.partition(" -- ")
        body, has_stage, _ = rest.rpartition(" -- stage_id=")
        if has_stage:
            self.staged_nodes += 1
            rest = body
        name, has_fields, fields = rest.rpartition(" -- ")
        if not separator or not _IDENTIFIER.fullmatch(identifier):
            self._unreadable(number, line)
        elif has_fields and "=" in fields:
            self._read_node(number, identifier, name, fields)
        elif not has_stage and _IDENTIFIER.fullmatch(rest):
            self._read_edge(number, (identifier, rest))
        else:
            self._unreadable(number, line)

    def _unreadable(self, number: int, line: str) -> None:
        self.problems.append(
            f"line {number}: {shorten(line)} is neither a node nor an edge; expected "
            f"'{EXAMPLE}' or a tab and 'node1 -- node2'"
        )

    def _read_edge(self, number: int, edge: tuple[str, str]) -> None:
        if edge in self.edges:
            self.repeated_edges += 1
        else:
            self.edges[edge] = number

    def _read_node(self, number: int, identifier: str, name: str, text: str) -> None:
        place = f"line {number}: {identifier}"
        if identifier in self.nodes:
            first = self.node_lines[identifier]
            self.problems.append(f"{place} is also on line {first}; keep one or rename one")
            return
        values = self._fields(place, text)
        missing = [name for name in FIELDS if name not in values]
        if missing:
            self.problems.append(f"{place}: no {', '.join(missing)}; add it, for example {EXAMPLE}")
        # A node whose figures are wrong still is one: its edges are no further errors.
        self.node_lines[identifier] = number
        self.nodes[identifier] = ProfileNode(
            identifier,
            name,
            self._milliseconds(place, FORWARD, values.get(FORWARD, "0")),
            self._milliseconds(place, BACKWARD, values.get(BACKWARD, "0")),
            self._list_of_bytes(place, ACTIVATION, values.get(ACTIVATION, "0")),
            self._bytes(place, PARAMETERS, values.get(PARAMETERS, "0")),
        )

    def _fields(self, place: str, text: str) -> dict[str, str]:
        values: dict[str, str] = {}
        position = 0
        while position < len(text):
            match = _FIELD.match(text, position)
            if match is None:
                self.problems.append(
                    f"{place}: {shorten(text[position:].strip())} is no field; expected name=value "
                    "with a number, or sizes as [1; 2]"
                )
                return dict.fromkeys(FIELDS, "0") | values
            name, value = match.groups()
            if name in values:
                self.problems.append(f"{place}: {name} appears twice; keep one")
            elif name not in FIELDS:
                self.other_fields[name] = self.other_fields.get(name, 0) + 1
            values[name] = value.strip()
            position = match.end()
        return values

    def _milliseconds(self, place: str, name: str, text: str) -> float:
        return self._number(place, name, text, MOST_MS, "milliseconds")

    def _bytes(self, place: str, name: str, text: str) -> int:
        value = self._number(place, name, text, MOST_BYTES, "bytes")
        self.fractional_sizes += value != int(value)
        return math.ceil(value)

    def _list_of_bytes(self, place: str, name: str, text: str) -> tuple[int, ...]:
        if not text.startswith("["):
            return (self._bytes(place, name, text),)
        elements = re.split("[;,]", text[1:-1]) if text[1:-1].strip() else []
        sizes = tuple(self._bytes(place, name, element.strip()) for element in elements)
        if sum(sizes) > MOST_BYTES:
            self.problems.append(
                f"{place}: {name}: the list has {sum(sizes)} bytes in all; expected at most "
                f"{MOST_BYTES:.0e}"
            )
        return sizes

    def _number(self, place: str, name: str, text: str, most: float, unit: str) -> float:
        """A number of the file, or 0 and a problem."""
        value = _float(text)
        if value is None:
            wrong = "is no number"
        elif not math.isfinite(value):
            wrong = "is not finite"
        elif value < 0:
            wrong = "is negative"
        elif value > most:
            wrong = f"is more than {most:.0e}"
        else:
            return value
        self.problems.append(
            f"{place}: {name}: {shorten(text)} {wrong}; expected {unit}, from 0 to {most:.0e}"
        )
        return 0.0


def _float(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _graph_problems(draft: _Draft) -> Iterator[str]:
    if not draft.nodes:
        yield f"there is no node in it; a profile has lines such as '{EXAMPLE}'"
        return
    unknown = False
    for edge, number in draft.edges.items():
        for end in edge:
            if end not in draft.nodes:
                unknown = True
                yield (
                    f"line {number}: edge {' -- '.join(edge)}: there is no node {end!r}; add its "
                    "line or remove the edge"
                )
    if not unknown:
        yield from _cycle_problem(draft)


def _cycle_problem(draft: _Draft) -> Iterator[str]:
    graph = nx.DiGraph(list(draft.edges))
    try:
        cycle = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return
    number = max(draft.edges[edge] for edge in cycle)
    names = [start for start, _ in cycle]
    shown = names[:_SHOWN_OF_A_CYCLE] + ["…"] * (len(names) > _SHOWN_OF_A_CYCLE) + names[:1]
    yield (
        f"line {number}: this edge closes a cycle of {plural(len(names), 'node')}: "
        f"{' -> '.join(shown)}; layers run in one direction: remove the edge that goes backwards"
    )


def _notes(draft: _Draft) -> Iterator[str]:
    if draft.repeated_edges:
        yield f"{plural(draft.repeated_edges, 'edge')} given again in the file: read once"
    if draft.staged_nodes:
        yield (
            f"{plural(draft.staged_nodes, 'node')} with a stage_id, which is ignored: the "
            f"planner chooses the stages"
        )
    for name, count in draft.other_fields.items():
        yield f"field {shorten(name)} of {plural(count, 'node')} is not read"
    if draft.fractional_sizes:
        yield f"{plural(draft.fractional_sizes, 'size')} of no whole bytes: rounded up"
