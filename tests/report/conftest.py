"""Timelines of small pipelines, one for every shape a report has to show."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from builders import (
    boundary,
    cluster,
    device_type,
    graph,
    layer,
    link,
    orders,
    parameter,
    pipeline,
    star,
)

from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline
from planner.model.layer_graph import LayerGraph
from planner.schedules.best import best_schedule
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline

NAMES = ("embed", "block0", "block1", "head")
REPLICATED = [(NAMES[:2], ("d0", "d1")), (NAMES[2:], ("d2",))]
INTERLEAVED = [((name,), (f"d{index % 2}",)) for index, name in enumerate(NAMES)]
TWO_STAGES = [(NAMES[:2], ("d0",)), (NAMES[2:], ("d1",))]


def chain() -> LayerGraph:
    """Layers of 1, 2, 3 and 4 seconds forward and twice that backward, 10**8 bytes between."""
    return graph(
        [
            layer(name, seconds, 2 * seconds, stash_bytes=2**28, parameters=[f"{name}.weight"])
            for seconds, name in enumerate(NAMES, 1)
        ],
        [boundary(u, v, bytes_=10**8) for u, v in pairwise(NAMES)],
        [parameter(f"{name}.weight", 10**8) for name in NAMES],
    )


def scheduled(placed: PlacedPipeline) -> Timeline:
    """The best heuristic schedule's timeline."""
    schedule = best_schedule(placed, backward="whole")
    assert schedule is not None
    return schedule.timeline


def replicated(the_cluster: Cluster) -> Timeline:
    """Two replicas of the first stage, one device with the second."""
    return scheduled(pipeline(chain(), the_cluster, REPLICATED, microbatches=6))


@pytest.fixture(scope="session")
def many_replicas() -> Timeline:
    """Sixteen replicas of each of two stages, the last one of half the speed."""
    names = [f"d{number}" for number in range(32)]
    types = {"unit": device_type(), "slow": device_type(efficiency=0.5)}
    machines = cluster(
        {name: "slow" if name == names[-1] else "unit" for name in names},
        [link(name, "hub") for name in names],
        ["hub"],
        types,
    )
    stages = [(NAMES[:2], tuple(names[:16])), (NAMES[2:], tuple(names[16:]))]
    return scheduled(pipeline(chain(), machines, stages, microbatches=31))


def interleaved() -> Timeline:
    """Two devices of two stages each."""
    placed = pipeline(chain(), star(2), INTERLEAVED, microbatches=6, max_stages_per_device=2)
    return scheduled(placed)


def split_backward() -> Timeline:
    """Weight gradients after the input gradients."""
    order = orders(d0="0F0 0F1 0I0 0I1 0W0 0W1", d1="1F0 1I0 1F1 1I1 1W0 1W1")
    return simulate(pipeline(chain(), star(2), TWO_STAGES), order)


def overlapping_transfers() -> Timeline:
    """Transfers far longer than the forwards before them, over links without limit."""
    slow_links = cluster(
        ["d0", "d1", "d2"], [link(f"d{i}", "hub", 0.01, shared=True) for i in range(3)], ["hub"]
    )
    stages = [(NAMES[:1], ("d0",)), (NAMES[1:2], ("d1",)), (NAMES[2:], ("d2",))]
    return scheduled(pipeline(chain(), slow_links, stages, microbatches=4))


TIMELINES: dict[str, Callable[[], Timeline]] = {
    "replicated": lambda: replicated(star(3)),
    "half_duplex": lambda: replicated(star(3, duplex="half")),
    "shared_links": overlapping_transfers,
    "interleaved": interleaved,
    "split_backward": split_backward,
    "one_device": lambda: scheduled(pipeline(chain(), star(1), [(NAMES, ("d0",))])),
}


@cache
def timeline_named(name: str) -> Timeline:
    return TIMELINES[name]()


@pytest.fixture(params=sorted(TIMELINES))
def timeline(request: pytest.FixtureRequest) -> Timeline:
    """Every shape in turn."""
    return timeline_named(request.param)


@pytest.fixture
def timeline_of() -> Callable[[str], Timeline]:
    """The timeline of one shape, by name."""
    return timeline_named


@pytest.fixture
def timeline_of_dollars() -> Timeline:
    """Names with what matplotlib would read as formulas, some of them broken."""
    name = r"a$x_{$ \$"
    cluster_of_dollars = Cluster.model_validate(
        {
            **dict(cluster({"d0": name}, [], types={name: device_type(memory_gib=10)})),
            "name": r"$\frac{$",
        }
    )
    rows = [layer(r"$\sum{$[/red]", parameters=["$w$"])]
    the_graph = graph(rows, [], [parameter("$w$", 10**8)], name=name)
    return scheduled(pipeline(the_graph, cluster_of_dollars, [((rows[0]["name"],), ("d0",))]))
