"""A profile as a layer graph: one layer per node, one boundary per producer and set of users.

Rules, since a profile does not say these things:

- A user ``__getitem__(k)`` reads element k of its producer's list of sizes; every other user reads
  all elements. Elements that nobody reads stay where they are made.
- A tensor carries a gradient if its producer, or anything before it, has parameters or a backward
  time.
- Backward time: a layer without parameters has an input gradient only; one whose inputs carry no
  gradient a weight gradient only; any other half and half, as in a matrix product, whose two
  gradients cost the same (Qi et al. 2024, "Zero bubble pipeline parallelism", section 2).
- Stash: a layer keeps what it hands on, its ``activation_size``: the convention of PipeDream's
  planner. A ``__getitem__`` is a view: its bytes are those of the producer.
- Parameters are float32: one element is 4 bytes.
- An ``Input`` counts as it stands, or takes no time if the user says so: what is measured there is
  the loading of data. PipeDream's planner leaves inputs out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import networkx as nx

from planner.interop.importing.imported import ImportedTensor, ImportOptions
from planner.interop.importing.narrow_order import NarrowOrder
from planner.interop.importing.profile_text import Profile, ProfileNode
from planner.model.figures import MeasuredTimes
from planner.model.graph_record import Boundary, GraphRecord, Layer, Parameter
from planner.model.layer_graph import LayerGraph
from planner.units import plural

PRECISION: Final = "float32"
BYTES_PER_ELEMENT = 4
_ITEM = re.compile(r"__getitem__\((\d{1,6})\)")
_LONGEST_NAME = 40
_MOST_ELEMENTS = 4
_SHARE_WORTH_A_NOTE = 0.01


@dataclass(frozen=True)
class ProfileGraph:
    """A profile on its way to a layer graph.

    Attributes:
        profile: nodes and edges.
        options: the device type of the times.
    """

    profile: Profile
    options: ImportOptions

    def layer_graph(self, name: str, samples: int) -> LayerGraph:
        """The layer graph, in an executable order whose cuts are narrow."""
        order = NarrowOrder(tuple(self.profile.nodes), self.tensors).find()
        nodes = [self.profile.nodes[identifier] for identifier in order]
        return LayerGraph.from_record(
            GraphRecord(
                name=name,
                samples_per_microbatch=samples,
                precision=PRECISION,
                layers=tuple(map(self._layer, nodes)),
                boundaries=tuple(self._boundaries(order)),
                parameters=tuple(
                    self._parameter(node) for node in nodes if node.parameter_bytes > 0
                ),
                flop_coverage=0.0,
            )
        )

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Nodes and edges by identifier."""
        graph = nx.DiGraph()
        graph.add_nodes_from(self.profile.nodes)
        graph.add_edges_from(self.profile.edges)
        return graph

    @cached_property
    def tensors(self) -> tuple[ImportedTensor, ...]:
        """Return the tensors that nodes send; list elements with the same users are one tensor."""
        return tuple(tensor for node in self.profile.nodes.values() for tensor in self._made(node))

    def _made(self, node: ProfileNode) -> Iterator[ImportedTensor]:
        count = max(1, len(node.activation_bytes))
        users_of: list[list[str]] = [[] for _ in range(count)]
        for user in self.graph.successors(node.identifier):
            for element in self._elements_read(user, count):
                users_of[element].append(user)
        sizes = node.activation_bytes or (0,)
        elements_of: dict[tuple[str, ...], list[int]] = {}
        for element, names in enumerate(users_of):
            if names:
                elements_of.setdefault(tuple(names), []).append(element)
        for users, elements in elements_of.items():
            total = sum(sizes[element] for element in elements)
            yield ImportedTensor(node.identifier, users, total, tuple(elements))

    def _elements_read(self, user: str, count: int) -> range:
        item = self._item(user)
        return range(count) if item is None or item >= count else range(item, item + 1)

    def _item(self, identifier: str) -> int | None:
        match = _ITEM.fullmatch(self.profile.nodes[identifier].name.strip())
        return int(match[1]) if match else None

    @cached_property
    def carries_gradient(self) -> Mapping[str, bool]:
        """Return whether the loss sends a gradient to a node's output."""
        carries: dict[str, bool] = {}
        for identifier in nx.topological_sort(self.graph):
            node = self.profile.nodes[identifier]
            carries[identifier] = (
                node.parameter_bytes > 0
                or node.backward_ms > 0
                or any(carries[before] for before in self.graph.predecessors(identifier))
            )
        return carries

    @cached_property
    def views(self) -> Mapping[str, str]:
        """Each ``__getitem__`` and the node that keeps its bytes: the one it is a part of."""
        views: dict[str, str] = {}
        for identifier in nx.topological_sort(self.graph):
            before = list(self.graph.predecessors(identifier))
            if self._item(identifier) is None or len(before) != 1:
                continue
            sizes = self.profile.nodes[before[0]].activation_bytes
            read = sum(sizes[element] for element in self._elements_read(identifier, len(sizes)))
            if sum(self.profile.nodes[identifier].activation_bytes) <= read:
                views[identifier] = views.get(before[0], before[0])
        return views

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {i: layer_name(node) for i, node in self.profile.nodes.items()}

    def times(self, node: ProfileNode) -> MeasuredTimes:
        """The measured times, the backward split in two."""
        if self.options.free_inputs and self._is_input(node):
            return MeasuredTimes(forward_s=0.0, input_gradient_s=0.0, weight_gradient_s=0.0)
        backward_s = node.backward_ms * 1e-3
        inputs_carry = any(
            self.carries_gradient[before] for before in self.graph.predecessors(node.identifier)
        )
        share = 0.0 if node.parameter_bytes == 0 else 0.5 if inputs_carry else 1.0
        return MeasuredTimes(
            forward_s=node.forward_ms * 1e-3,
            input_gradient_s=backward_s * (1 - share),
            weight_gradient_s=backward_s * share,
        )

    def _is_input(self, node: ProfileNode) -> bool:
        is_source = self.graph.in_degree(node.identifier) == 0
        return is_source and node.name.strip().startswith("Input") and not node.parameter_bytes

    def _layer(self, node: ProfileNode) -> Layer:
        times = self.times(node)
        device = self.options.device
        flop_per_s = device.peak_tflop_per_s[PRECISION] * 1e12 * device.efficiency
        return Layer(
            name=self._names[node.identifier],
            forward_flops=round(times.forward_s * flop_per_s),
            input_gradient_flops=round(times.input_gradient_s * flop_per_s),
            weight_gradient_flops=round(times.weight_gradient_s * flop_per_s),
            forward_traffic_bytes=0,
            input_gradient_traffic_bytes=0,
            weight_gradient_traffic_bytes=0,
            stash_bytes=0 if node.identifier in self.views else sum(node.activation_bytes),
            parameters=(self._parameter(node).name,) if node.parameter_bytes else (),
            measured={self.options.type_name: times},
        )

    def _parameter(self, node: ProfileNode) -> Parameter:
        return Parameter(
            name=f"{self._names[node.identifier]}.parameters",
            elements=-(-node.parameter_bytes // BYTES_PER_ELEMENT),
            bytes=node.parameter_bytes,
        )

    def _boundaries(self, order: tuple[str, ...]) -> Iterator[Boundary]:
        rank = {identifier: index for index, identifier in enumerate(order)}
        for tensor in sorted(self.tensors, key=lambda tensor: rank[tensor.producer]):
            producer = self.profile.nodes[tensor.producer]
            is_part = len(tensor.elements) < len(producer.activation_bytes)
            yield Boundary(
                name=self._names[tensor.producer] + (_part(tensor.elements) if is_part else ""),
                producer=self._names[tensor.producer],
                users=tuple(
                    self._names[user] for user in sorted(tensor.users, key=rank.__getitem__)
                ),
                bytes=tensor.bytes,
                shape=(-(-tensor.bytes // BYTES_PER_ELEMENT),),
                dtype=PRECISION,
                requires_grad=self.carries_gradient[tensor.producer],
                saved_by=self._names[self.views.get(tensor.producer, tensor.producer)],
            )

    def notes(self) -> Iterator[str]:
        """Return the assumptions made for this profile, for the user."""
        yield from self._notes_of_lists()
        yield from self._notes_of_nodes()
        yield from self._notes_of_times()

    def _notes_of_lists(self) -> Iterator[str]:
        nodes = self.profile.nodes.values()
        lists = [node for node in nodes if len(node.activation_bytes) > 1]
        whole = sum(
            self._item(user) is None for node in lists for user in self.graph[node.identifier]
        )
        if whole:
            yield (
                f"{plural(whole, 'edge')} from nodes with lists of sizes to no __getitem__: taken "
                "to carry every element"
            )
        astray = sum(
            item is not None and item >= max(1, len(node.activation_bytes))
            for node in nodes
            if sum(node.activation_bytes)
            for item in map(self._item, self.graph[node.identifier])
        )
        if astray:
            yield f"{astray} __getitem__ of an element that has no size: taken to get all"

    def _notes_of_nodes(self) -> Iterator[str]:
        nodes = self.profile.nodes.values()
        unlearned = sum(node.parameter_bytes > 0 and node.backward_ms == 0 for node in nodes)
        if unlearned:
            yield (
                f"{plural(unlearned, 'node')} with parameters but no backward time: their "
                f"gradients are assumed to take no time, but are still reduced and applied"
            )
        alone = sum(1 for _ in nx.isolates(self.graph)) if len(self.profile.nodes) > 1 else 0
        if alone:
            yield f"{plural(alone, 'node')} without edges: may be in any stage"

    def _notes_of_times(self) -> Iterator[str]:
        nodes = self.profile.nodes.values()
        total_ms = sum(node.forward_ms + node.backward_ms for node in nodes)
        inputs_ms = sum(n.forward_ms + n.backward_ms for n in nodes if self._is_input(n))
        if inputs_ms > _SHARE_WORTH_A_NOTE * total_ms:
            verdict = "counted as 0" if self.options.free_inputs else "--free-inputs counts it as 0"
            yield (
                f"Input nodes take {inputs_ms:g} ms, {inputs_ms / total_ms:.0%} of all time, "
                f"probably to load data: {verdict}"
            )
        if not total_ms:
            yield "every time is 0; plans can differ in transfers only"


def _part(elements: tuple[int, ...]) -> str:
    """Elements of a list, such as ``[0, 2]``; no two tensors of a node begin with the same."""
    shown = [str(element) for element in elements]
    if len(shown) > _MOST_ELEMENTS:
        shown = [*shown[: _MOST_ELEMENTS - 1], "…", shown[-1]]
    return f"[{', '.join(shown)}]"


def layer_name(node: ProfileNode) -> str:
    """``identifier:name``, a long name up to its first bracket; unique, as identifiers are."""
    text = " ".join(node.name.split())
    if len(text) > _LONGEST_NAME:
        text = text.partition("(")[0].strip()[:_LONGEST_NAME]
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return f"{node.identifier}:{text}" if text else node.identifier
