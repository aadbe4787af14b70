"""Recomputation for a whole partition: which layers, for how many microbatches in flight.

More microbatches in flight hide the way of a microbatch through the later stages and back; each
takes a stash, and where memory is short it is paid for by recomputing. The variants offered here
are worth scheduling; the schedule decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage, static_with_workspace
from planner.search.partition.chain import Chain, Partition
from planner.search.partition.memory.recompute import Holding, Recomputation, RecomputeChooser
from planner.search.partition.memory.steady_state import best_in_flight

InFlight = Mapping[int, int]
"""Microbatches in flight on each replica, by stage."""


class RecomputeVariants:
    """What to recompute in partitions of one chain; choices are remembered between them.

    Every ``partition`` recomputes nothing, and ``pipeline`` is that partition placed.

    Attributes:
        chooser: the choices stage by stage.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self.chooser = RecomputeChooser(chain)
        self._allowed = chain.problem.job.recompute

    def variants(self, partition: Partition, pipeline: PlacedPipeline) -> list[Partition]:
        """Return distinct choices worth scheduling; nothing recomputed first where that may fit."""
        if not self._allowed or _holds_all(pipeline):
            return [partition]
        wanted = [one_forward_one_backward(pipeline)]
        if _is_single(pipeline):
            steady = best_in_flight(pipeline, lambda j, k: self._extra_s(partition, pipeline, j, k))
            wanted = [steady, *wanted] if steady is not None else []
        else:
            wanted += [_fewer(wanted[0], 2), _fewer(wanted[0], 4)]
        found = [self.with_in_flight(partition, pipeline, in_flight) for in_flight in wanted]
        plain = [partition] if _may_fit(pipeline) else []
        return list(dict.fromkeys([*plain, *(variant for variant in found if variant)]))

    def may_change(self, pipeline: PlacedPipeline) -> bool:
        """Return whether recomputing more or less could let these stages run faster."""
        recomputes = any(stage.spec.recompute for stage in pipeline.stages)
        return self._allowed and (recomputes or not _holds_all(pipeline))

    def leanest(self, partition: Partition, pipeline: PlacedPipeline) -> Partition | None:
        """Return the choice for one microbatch in flight and nothing else; None if it does not fit.

        With one stage a device and no replicas this fits whenever anything does.
        """
        if not self._allowed:
            return partition if _may_fit(pipeline) else None
        one = dict.fromkeys(range(len(partition)), 1)
        return self._choose(partition, pipeline, one, ample=False)

    def with_in_flight(
        self, partition: Partition, pipeline: PlacedPipeline, in_flight: InFlight
    ) -> Partition | None:
        """Return the choice for so many microbatches in flight, or as many as fit; None if none."""
        if _is_single(pipeline):
            in_flight = {
                j: self._as_many_as_fit(partition, pipeline, j, most)
                for j, most in in_flight.items()
            }
            if not all(in_flight.values()):
                return None
        ample = self._choose(partition, pipeline, in_flight, ample=True)
        return ample or self._choose(partition, pipeline, in_flight, ample=False)

    def fits_never(self, partition: Partition, pipeline: PlacedPipeline) -> bool:
        """Return whether it is proved that these stages fit by no choice and no schedule.

        Some replica of each stage runs a microbatch: one stash fits at least on the roomiest.
        """
        if any(_free_bytes(pipeline, device) < 0 for device in pipeline.devices):
            return True
        return any(self._is_too_large(partition, pipeline, j) for j in range(len(partition)))

    def _is_too_large(self, partition: Partition, pipeline: PlacedPipeline, j: int) -> bool:
        stage = pipeline.stages[j]
        free = max(_free_bytes(pipeline, device) for device in stage.spec.devices)
        room = free - stage.tight_bytes(splits=self._chain.splits)
        if room >= stage.stash_bytes:
            return False
        return not self._allowed or self.chooser.fits_never(self._holding(partition, j, 1), room)

    def _as_many_as_fit(
        self, partition: Partition, pipeline: PlacedPipeline, j: int, most: int
    ) -> int:
        """The largest number in flight of a stage, up to ``most``, that some choice makes fit."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._choice(partition, pipeline, j, middle) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def _extra_s(
        self, partition: Partition, pipeline: PlacedPipeline, j: int, in_flight: int
    ) -> dict[str, float] | None:
        choice = self._choice(partition, pipeline, j, in_flight)
        if choice is None:
            return None
        cluster, layers = self._chain.problem.cluster, list(choice.layers)
        return {
            device: self.chooser.again_s(cluster.type_of(device), layers)
            for device in partition[j].devices
        }

    def _choice(
        self, partition: Partition, pipeline: PlacedPipeline, j: int, in_flight: int
    ) -> Recomputation | None:
        """Return the choice for one stage: with room for what waits, or at least without."""
        holding = self._holding(partition, j, in_flight)
        room = min(_free_bytes(pipeline, device) for device in partition[j].devices)
        stage = pipeline.stages[j]
        ample = self.chooser.choose([holding], room - _ample_bytes(stage))
        return ample or self.chooser.choose([holding], room - stage.tight_bytes())

    def _choose(
        self, partition: Partition, pipeline: PlacedPipeline, in_flight: InFlight, *, ample: bool
    ) -> Partition | None:
        room_of = _ample_bytes if ample else PlacedStage.tight_bytes
        layers: dict[int, list[int]] = {}
        for group in _groups(pipeline):
            devices = {device for j in group for device in partition[j].devices}
            # A replicated stage that shares its devices is counted on all of them.
            static = static_with_workspace([pipeline.stages[j] for j in group])
            sizes = [room_of(pipeline.stages[j]) for j in group]
            room = min(pipeline.capacity_bytes(device) for device in devices) - static
            room -= sum(sizes) if ample else max(sizes)
            holdings = [self._holding(partition, j, in_flight[j]) for j in group]
            found = self.chooser.choose(holdings, room)
            if found is None:
                return None
            for j in group:
                stage = partition[j]
                layers[j] = [x for x in found.layers if stage.begin <= x < stage.end]
        return tuple(
            replace(stage, recompute=tuple(layers[j])) for j, stage in enumerate(partition)
        )

    def _holding(self, partition: Partition, j: int, in_flight: int) -> Holding:
        stage, cluster = partition[j], self._chain.problem.cluster
        types = tuple(sorted(cluster.type_of(device) for device in stage.devices))
        return Holding(stage.begin, stage.end, types, in_flight)


def one_forward_one_backward(pipeline: PlacedPipeline) -> dict[int, int]:
    """Return 1F1B's microbatches in flight on each replica: one for every later device."""
    held, after = {}, 0
    for j in reversed(range(len(pipeline.stages))):
        replicas = len(pipeline.stages[j].spec.devices)
        after += replicas
        held[j] = min(-(-pipeline.microbatches // replicas), -(-after // replicas))
    return held


def _fewer(in_flight: InFlight, divisor: int) -> dict[int, int]:
    return {j: -(-held // divisor) for j, held in in_flight.items()}


def _is_single(pipeline: PlacedPipeline) -> bool:
    """Return whether every device holds one stage."""
    return all(len(stages) == 1 for stages in pipeline.stages_on.values())


def _free_bytes(pipeline: PlacedPipeline, device: str) -> int:
    return pipeline.capacity_bytes(device) - pipeline.static_bytes(device)


def _ample_bytes(stage: PlacedStage) -> int:
    """Return enough for one tensor of each kind to wait or be on its way."""
    gradients = stage.input_gradient_bytes + stage.output_gradient_bytes
    return stage.input_bytes + stage.output_bytes + gradients


def _holds_all(pipeline: PlacedPipeline) -> bool:
    """Return whether all microbatches at once fit everywhere: recomputing gains nothing."""
    return all(
        sum(
            pipeline.microbatches * (pipeline.stages[j].stash_bytes + _ample_bytes(stage))
            for j, stage in ((j, pipeline.stages[j]) for j in stages)
        )
        <= _free_bytes(pipeline, device)
        for device, stages in pipeline.stages_on.items()
    )


def _may_fit(pipeline: PlacedPipeline) -> bool:
    """Return whether each stage's microbatch fits on some replica, so that a schedule may exist."""
    return all(
        any(
            stage.stash_bytes + stage.tight_bytes() <= _free_bytes(pipeline, device)
            for device in stage.spec.devices
        )
        for stage in pipeline.stages
    )


def _groups(pipeline: PlacedPipeline) -> Iterator[list[int]]:
    """Yield stages that share devices, directly or through others."""
    left = set(range(len(pipeline.stages)))
    while left:
        group: list[int] = []
        queue = [min(left)]
        while queue:
            j = queue.pop()
            if j in left:
                left.remove(j)
                group.append(j)
                devices = pipeline.stages[j].spec.devices
                queue += [k for device in devices for k in pipeline.stages_on[device]]
        yield sorted(group)
