"""Small pipelines made by hand: three devices in a row, layers of plain figures."""

from collections.abc import Callable
from typing import Any

import pytest

from planner.artifacts.cluster import Cluster
from planner.artifacts.job import Job
from planner.artifacts.layer_graph import Boundary, GraphRecord, Layer, LayerGraph, Parameter
from planner.artifacts.operations import parse_order
from planner.artifacts.problem import Problem
from planner.costs.placement import PlacedPipeline, StageSpec, place
from planner.schedule.heuristic import best_heuristic_schedule
from planner.simulator import Timeline, simulate

MIB = 2**20
Stages = list[tuple[tuple[str, ...], tuple[str, ...]]]

BUSY_LINK = {"between": ["node", "other"], "bandwidth_gb_per_s": 5.0, "latency_us": 10.0}
REPLICATED: Stages = [(("embed", "block0"), ("node/gpu0", "node/gpu1")), (("block1", "head"), ("other",))]
INTERLEAVED: Stages = [
    (("embed",), ("node/gpu0",)),
    (("block0",), ("other",)),
    (("block1",), ("node/gpu0",)),
    (("head",), ("other",)),
]


def cluster(**link: Any) -> Cluster:
    """Two GPUs in a node and a third one beside it; keywords change the link between them."""
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": "triple",
            "nodes": [{"name": "node", "devices": 2, "type": "A100-40GB", "link": "PCIe4-x16"}],
            "devices": [{"name": "other", "type": "A10"}],
            "links": [{**BUSY_LINK, **link}],
        }
    )


def graph() -> LayerGraph:
    """Four layers in a chain, each with one parameter, handing on 8 MiB."""
    names = ("embed", "block0", "block1", "head")
    layers = tuple(
        Layer(
            name=name,
            forward_flops=(index + 1) * 10**11,
            input_gradient_flops=(index + 1) * 10**11,
            weight_gradient_flops=(index + 1) * 10**11,
            forward_traffic_bytes=10**7,
            input_gradient_traffic_bytes=10**7,
            weight_gradient_traffic_bytes=10**7,
            stash_bytes=(index + 1) * 16 * MIB,
            parameters=(f"{name}.weight",),
        )
        for index, name in enumerate(names)
    )
    boundaries = tuple(
        Boundary(
            name=f"{first}_output",
            producer=first,
            users=(second,),
            bytes=8 * MIB,
            shape=(4, 2**19),
            dtype="float32",
            requires_grad=True,
        )
        for first, second in zip(names, names[1:], strict=False)
    )
    parameters = tuple(
        Parameter(name=f"{name}.weight", elements=16 * MIB, bytes=64 * MIB) for name in names
    )
    return LayerGraph.from_record(
        GraphRecord(
            name="chain",
            samples_per_microbatch=1,
            precision="float32",
            layers=layers,
            boundaries=boundaries,
            parameters=parameters,
        )
    )


def placed(stages: Stages, microbatches: int = 6, **link: Any) -> PlacedPipeline:
    """The chain in the given stages on the three GPUs."""
    problem = Problem(graph(), cluster(**link), Job(microbatches=microbatches))
    return place(problem, [StageSpec(layers, devices) for layers, devices in stages])


def scheduled(stages: Stages, microbatches: int = 6, **link: Any) -> Timeline:
    """The best heuristic schedule's timeline."""
    schedule = best_heuristic_schedule(placed(stages, microbatches, **link))
    assert schedule is not None
    return schedule.timeline


def split_backward() -> Timeline:
    """Two stages that compute their weight gradients after the input gradients."""
    stages: Stages = [(("embed", "block0"), ("node/gpu0",)), (("block1", "head"), ("node/gpu1",))]
    orders = {
        "node/gpu0": "0F0 0F1 0I0 0I1 0W0 0W1",
        "node/gpu1": "1F0 1I0 1F1 1I1 1W0 1W1",
    }
    parsed = {device: parse_order(text, device) for device, text in orders.items()}
    return simulate(placed(stages, microbatches=2), parsed)


TIMELINES: dict[str, Callable[[], Timeline]] = {
    "replicated": lambda: scheduled(REPLICATED),
    "interleaved": lambda: scheduled(INTERLEAVED),
    "half_duplex": lambda: scheduled(REPLICATED, duplex="half"),
    "shared_link": lambda: scheduled(REPLICATED, shared=True),
    "split_backward": split_backward,
    "one_device": lambda: scheduled([(("embed", "block0", "block1", "head"), ("other",))]),
}


@pytest.fixture(params=sorted(TIMELINES))
def timeline(request: pytest.FixtureRequest) -> Timeline:
    """Every shape of pipeline in turn."""
    return TIMELINES[request.param]()


@pytest.fixture
def make_timeline() -> Callable[[str], Timeline]:
    """A pipeline's timeline by the name of its shape."""
    return lambda name: TIMELINES[name]()


@pytest.fixture
def replicated() -> Timeline:
    """Two replicas of the first stage, one device with the second."""
    return scheduled(REPLICATED)


@pytest.fixture
def interleaved() -> Timeline:
    """Two devices of two stages each."""
    return scheduled(INTERLEAVED)
