"""Which ranks hold which tensors of the model, and which of them speaks for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.artifacts.plan import Plan


@dataclass(frozen=True)
class Holders:
    """The ranks that hold each parameter and buffer, by the model's own names (FQNs)."""

    ranks: Mapping[str, tuple[int, ...]]

    @classmethod
    def of_plan(cls, plan: Plan) -> Holders:
        """From the stages' layers; a tied parameter has the holders of all its stages."""
        rank_of = {device: rank for rank, device in enumerate(plan.ranks)}
        used = {layer.name: layer.parameters for layer in plan.model.graph.layers}
        found: dict[str, set[int]] = {}
        for stage in plan.stages:
            for name in dict.fromkeys(name for layer in stage.layers for name in used[layer]):
                found.setdefault(name, set()).update(rank_of[d] for d in stage.devices)
        return cls({name: tuple(sorted(ranks)) for name, ranks in found.items()})

    def first_held(self, rank: int) -> frozenset[str]:
        """What this rank is the first to hold: it counts and writes it, the others do not."""
        return frozenset(name for name, ranks in self.ranks.items() if ranks[0] == rank)
