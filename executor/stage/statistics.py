"""Buffers that a forward writes: as if one process had run all microbatches in order.

Running statistics of batch normalisation and counters are not written when a microbatch runs: what
it would have written is noted, and applied at the end of the iteration in the order of
microbatches, whatever order they ran in and on which replicas. Ioffe and Szegedy 2015, "Batch
Normalization".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.tracing.sharing import is_counter, is_noted_normalisation


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A module with the same parameters, buffers and operations, in a graph of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    graph.output(result)
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return fx.GraphModule(module, graph)


_MEAN, _VARIANCE, _MOMENTUM = 3, 4, 6  # Places of their arguments.


class Statistics:
    """The observations of one iteration's microbatches, by buffer.

    A running average changes with each observation: ``new = (1 - momentum) old + momentum
    observed``; a counter by the same amount with each microbatch.

    Args:
        microbatches: of one iteration, over all replicas.
        buffers: of the stage, by FQN.
    """

    def __init__(self, microbatches: int, buffers: Mapping[str, Tensor]) -> None:
        self.microbatches = microbatches
        self.buffers = buffers
        self._microbatch = 0
        self.counters: dict[str, int] = defaultdict(int)
        # For each time that a microbatch writes an average, the momentum.
        self.momenta: dict[str, list[float]] = defaultdict(list)
        self._observed: dict[str, Tensor] = {}
        self._paused = False

    @property
    def is_empty(self) -> bool:
        """Whether no buffer of the stage is noted."""
        return not self.momenta and not self.counters

    def begin(self, microbatch: int) -> None:
        """Note what follows for this microbatch."""
        self._microbatch = microbatch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside, which has run before."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def row(self, name: str, time: int) -> Tensor:
        """Return the row for the ``time``-th observation of the microbatch that runs now."""
        if self._paused:
            return torch.empty_like(self.buffers[name])
        return self._rows(name)[self._microbatch, time]

    def _rows(self, name: str) -> Tensor:
        if name not in self._observed:
            buffer = self.buffers[name]
            shape = (self.microbatches, len(self.momenta[name]), *buffer.shape)
            self._observed[name] = buffer.new_zeros(shape)
        return self._observed[name]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """The rows of all microbatches that there are so far, by buffer."""
        return tuple(self._observed.values())

    def observed(self) -> Tensor | None:
        """All rows of this iteration as one vector: zeros for microbatches of other replicas.

        The sum over replicas is what all of them observed. None if there is nothing to share.
        """
        rows = [self._rows(name).reshape(-1) for name in sorted(self.momenta)]
        return torch.cat(rows) if rows else None

    def apply(self, observed: Tensor | None) -> None:
        """Write the buffers, microbatch by microbatch, and start anew.

        Args:
            observed: :meth:`observed`, summed over the stage's replicas.
        """
        parts = iter(() if observed is None else torch.split(observed, self._sizes()))
        for name, part in zip(sorted(self.momenta), parts, strict=True):
            buffer, momenta = self.buffers[name], self.momenta[name]
            for rows in part.view(self.microbatches, len(momenta), *buffer.shape):
                for momentum, row in zip(momenta, rows, strict=True):
                    buffer.mul_(1 - momentum).add_(row, alpha=momentum)
        for name, amount in self.counters.items():
            self.buffers[name].add_(amount * self.microbatches)
        self._observed.clear()

    def _sizes(self) -> list[int]:
        return [self._rows(name).numel() for name in sorted(self.momenta)]


class _Row(nn.Module):
    """Gives a normalisation the row to write into, in place of its buffer."""

    def __init__(self, statistics: Statistics, name: str, time: int) -> None:
        super().__init__()
        self.statistics = statistics
        self.name = name
        self.time = time

    def forward(self) -> Tensor:
        return self.statistics.row(self.name, self.time)


def note_statistics(module: fx.GraphModule, statistics: Statistics) -> fx.GraphModule:
    """A copy of a module that notes what its normalisations and counters would write.

    Buffers that other operations write are written as they run.
    """
    noting = copied(module)
    for node in list(noting.graph.nodes):
        if is_noted_normalisation(node):
            _note_normalisation(noting, node, statistics)
        elif is_counter(node):
            statistics.counters[str(node.args[0].target)] += node.args[1]
            noting.graph.erase_node(node)
    noting.recompile()
    return noting


def _note_normalisation(module: fx.GraphModule, node: fx.Node, statistics: Statistics) -> None:
    """Written with momentum 1, a row holds what the microbatch itself observed."""
    arguments: list[Any] = list(node.args)
    momentum = arguments[_MOMENTUM]
    for place in (_MEAN, _VARIANCE):
        buffer = arguments[place]
        name = str(buffer.target)
        time = len(statistics.momenta[name])
        statistics.momenta[name].append(momentum)
        key = f"row_{name.replace('.', '_')}_{time}"
        module.add_module(key, _Row(statistics, name, time))
        with module.graph.inserting_before(node):
            arguments[place] = module.graph.call_module(key)
        arguments[place].meta = dict(buffer.meta)
    arguments[_MOMENTUM] = 1.0
    node.args = tuple(arguments)
