"""Pipelines with a stage on each device, whose timelines several tests work out by hand.

Forward 1 s and backward 2 s unless told otherwise, 10**9 bytes take a second.
"""

from itertools import pairwise

from builders import boundary, cluster, device_type, graph, layer, link, orders, pipeline, star

from planner.costs.placed_pipeline import PlacedPipeline

GIB = 2**30
PAIR = orders(d0="0F0 0F1 0B0 0B1", d1="1F0 1B0 1F1 1B1")
"""1F1B of two microbatches on two devices."""
ONE_F_ONE_B = orders(d0="0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", d1="1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
"""Of four microbatches."""
ALTERNATING = orders(d0="0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3", d1="1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
"""Four microbatches, one after the other."""


def chain(*seconds: tuple[float, float], bytes_: int = 0, **job: object) -> PlacedPipeline:
    """A stage on a device of its own for every (forward, backward), around one switch."""
    names = "abcdefgh"[: len(seconds)]
    rows = [layer(name, *times) for name, times in zip(names, seconds, strict=True)]
    the_graph = graph(
        rows,
        [boundary(u, v, bytes_=bytes_) for u, v in pairwise(names)],
        samples_per_microbatch=job.get("samples_per_microbatch", 1),
    )
    stages = [([name], [f"d{index}"]) for index, name in enumerate(names)]
    return pipeline(the_graph, star(len(names)), stages, **job)


def crowded(
    memory_gib: float = 1.5, recompute: tuple[str, ...] = (), *, job_recompute: bool = True
) -> PlacedPipeline:
    """Four microbatches, each of which stashes 1 GiB on d0, which has so much memory."""
    rows = [layer("a", stash_bytes=GIB), layer("b")]
    types = {"unit": device_type(), "small": device_type(memory_gib=memory_gib)}
    machines = cluster({"d0": "small", "d1": "unit"}, [link("d0", "d1")], types=types)
    stages = [(["a"], ["d0"], recompute), (["b"], ["d1"])]
    the_graph = graph(rows, [boundary("a", "b", bytes_=0)])
    return pipeline(the_graph, machines, stages, microbatches=4, recompute=job_recompute)
