"""The devices of adopted stages: which rank holds a stage, and which devices are a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.artifacts.cluster import Cluster
from planner.errors import PipeplanError
from planner.units import plural

Lanes = tuple[tuple[str, ...], ...]
"""Of each pipeline the device of each stage."""


@dataclass(frozen=True)
class Ranks:
    """How stages lie on pipeline ranks.

    Attributes:
        size: pipeline ranks.
        rank_of: the rank of each stage.
    """

    size: int
    rank_of: tuple[int, ...]

    @property
    def is_loop(self) -> bool:
        """Whether a rank holds several stages."""
        return len(self.rank_of) > self.size


def ranks_in_turn(stages: int, size: int | None, *, is_v: bool) -> Ranks:
    """Stage i on rank i mod the number of ranks, or down the ranks and up again.

    Args:
        stages: their number.
        size: ranks; None for as many as stages, or half as many of a V.
        is_v: whether stages go down the ranks and up again.

    Raises:
        PipeplanError: if the stages cannot be dealt out so.
    """
    if size is None:
        size = stages // 2 if is_v and stages > 1 else stages
    if size < 1 or stages % size:
        raise PipeplanError(
            f"pipeline_size {size}: does not divide the {plural(stages, 'stage')}; every rank "
            "holds equally many"
        )
    if is_v and stages != 2 * size:
        raise PipeplanError(
            f"pipeline_size {size}: a schedule in the form of a V has two stages on every rank, "
            f"there are {plural(stages, 'stage')}; use another schedule or {2 * size} stages"
        )
    turn = tuple(range(size))
    return Ranks(size, turn + turn[::-1] if is_v else turn * (stages // size))


def lanes_on(cluster: Cluster, ranks: Ranks, replicas: int, devices: Sequence[str] | None) -> Lanes:
    """The device of every stage in every pipeline, in Megatron-LM's and torch's order of ranks.

    Device number ``rank * replicas + replica`` is that replica of the rank's stages: replicas of a
    rank are neighbours.

    Args:
        cluster: whose devices they are.
        ranks: of one pipeline.
        replicas: equal pipelines.
        devices: by name; None for the cluster's first, in its order.

    Raises:
        PipeplanError: if they are unknown, named twice, or not as many as are needed.
    """
    if replicas < 1:
        raise PipeplanError(f"replicas {replicas}: expected 1 or more")
    needed = ranks.size * replicas
    named = tuple(cluster.device_names if devices is None else devices)
    problems = [] if devices is None else _wrong(cluster, named)
    if len(named) < needed or (devices is not None and len(named) > needed):
        where = f"the cluster {cluster.name!r} has" if devices is None else "devices names"
        problems.append(
            f"{where} {plural(len(named), 'device')}, {plural(ranks.size, 'pipeline rank')} of "
            f"{plural(replicas, 'replica')} are {needed}; use other pipeline_size, replicas "
            "or devices"
        )
    if problems:
        raise PipeplanError(problems)
    return tuple(
        tuple(named[rank * replicas + replica] for rank in ranks.rank_of)
        for replica in range(replicas)
    )


def _wrong(cluster: Cluster, named: Sequence[str]) -> list[str]:
    known = set(cluster.device_names)
    problems = [
        f"devices: the cluster {cluster.name!r} has no device {name!r}; it has "
        f"{', '.join(cluster.device_names[:8])}{', …' if len(known) > 8 else ''}"
        for name in dict.fromkeys(named)
        if name not in known
    ]
    twice = [name for name in dict.fromkeys(named) if named.count(name) > 1]
    if twice:
        problems.append(f"devices: {', '.join(twice)} named several times; name each once")
    return problems
