"""A transformer of round figures: two layers of embedding, blocks, and norm, head and loss."""

from collections.abc import Sequence
from itertools import pairwise

from builders import boundary, cluster, graph, layer, link, parameter
from group_problems import split

from planner.cluster.cluster import Cluster
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem


def transformer(
    blocks: int, *, parts: int = 1, degrees: Sequence[int] = (), ahead: int = 0, **of_block: object
) -> LayerGraph:
    """Every block takes 1 s forward and 2 s backward, all else 0.1 s and 0.2 s; layers
    hand on 1000 bytes.

    Args:
        blocks: their number.
        parts: layers of each block.
        degrees: sizes of tensor-parallel groups over which all layers split, without collectives,
            with and without sequence parallelism.
        ahead: blocks of multi-token prediction, between norm and head.
        of_block: further fields of a block's layers.
    """
    predicted = [f"mtp.{number}" for number in range(ahead)]
    names = ["wte", "wpe", *_blocks(blocks, parts), "ln_f", *predicted, "lm_head", "loss"]
    rows = []
    for name in names:
        is_block = name.startswith("h.")
        seconds = 1 / parts if is_block else 0.1
        own = [] if name == "loss" else [f"{name}.weight"]
        fields = of_block if is_block else {}
        rows.append(layer(name, seconds, 2 * seconds, parameters=own, **fields))
    parameters = [parameter(name) for row in rows for name in row["parameters"]]
    small = [boundary(u, v, bytes_=1000) for u, v in pairwise(names)]
    splits = [
        split(
            rows,
            small,
            degree=degree,
            sequence=sequence,
            parameters=[p["name"] for p in parameters],
        )
        for degree in degrees
        for sequence in (False, True)
    ]
    return graph(rows, small, parameters=parameters, splits=splits)


def _blocks(blocks: int, parts: int) -> list[str]:
    if parts == 1:
        return [f"h.{number}" for number in range(blocks)]
    return [f"h.{number}.part{part}" for number in range(blocks) for part in range(parts)]


def machines(nodes: int, each: int = 1, **types: dict) -> Cluster:
    """Nodes ``n0``, … of devices ``n0/gpu0``, … around a switch of 1000 GB/s."""
    names = [f"n{node}/gpu{gpu}" for node in range(nodes) for gpu in range(each)]
    return cluster(names, [link(name, "hub", 1000) for name in names], ["hub"], types or None)


def problem(the_graph: LayerGraph, the_cluster: Cluster, **job: object) -> Problem:
    """With plain SGD, and up to four stages on a device."""
    job = {"optimizer": "sgd", "microbatches": 4, "max_stages_per_device": 4, **job}
    return Problem(the_graph, the_cluster, Job.model_validate(job))
