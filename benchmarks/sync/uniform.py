"""Worlds of equal pipelines of one rank each, for benchmarks and tests."""

from __future__ import annotations

from planner.sync.simulation.world import LinkCost, PipelineRank, World


def uniform_world(
    workers: int,
    compute_s: float,
    parameter_bytes: int,
    link: LinkCost,
    *,
    backward_share: float = 0.5,
    optimizer_s: float = 0.0,
    pipelines_per_node: int = 1,
    slots: int = 1,
) -> World:
    """Return pipelines of one rank on nodes with equal links: data-parallel training.

    Args:
        workers: number of workers.
        compute_s: time of forward and backward together.
        parameter_bytes: bytes that each holds.
        link: link between any two.
        backward_share: fraction of ``compute_s`` during which gradients can be sent.
        optimizer_s: time of the optimizer step.
        pipelines_per_node: pipelines that share a network card.
        slots: slots of an iteration, see :class:`World`.
    """
    rank = PipelineRank(
        first_forward_s=0.0,
        last_backward_s=compute_s,
        forward_s=compute_s * (1 - backward_share),
        backward_s=compute_s * backward_share,
        optimizer_s=optimizer_s,
        parameter_bytes=parameter_bytes,
    )
    return World(workers, (rank,), link, link, pipelines_per_node=pipelines_per_node, slots=slots)
