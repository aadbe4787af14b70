"""Which layers a stage recomputes: the least extra time that fits, by trying every choice."""

from collections.abc import Iterator
from itertools import chain as joined
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layer_graphs

from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedStage, StageSpec
from planner.costs.placement import place
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.search.partition.chain import Chain
from planner.search.partition.memory.knapsack import TOLERANCE, cheapest_cover
from planner.search.partition.memory.recompute import Holding, Recomputation, RecomputeChooser

TYPES = ("fast", "slow")


def chain_of(graph: LayerGraph) -> Chain:
    kinds = {
        name: {
            "memory_gib": 100,
            "memory_bandwidth_gb_per_s": 1000,
            "peak_tflop_per_s": {"float32": peak},
        }
        for name, peak in zip(TYPES, (2.0, 1.0), strict=True)
    }
    devices = [{"name": f"d{i}", "type": TYPES[i % 2]} for i in range(4)]
    links = [{"between": ["s", row["name"]], "bandwidth_gb_per_s": 1} for row in devices]
    cluster = Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "device_types": kinds,
            "devices": devices,
            "switches": ["s"],
            "links": links,
        }
    )
    return Chain(Problem(graph, cluster, Job()))


def subsets(layers: range) -> Iterator[tuple[int, ...]]:
    return joined.from_iterable(combinations(layers, n) for n in range(len(layers) + 1))


def placed_stage(chain: Chain, begin: int, end: int, recompute: tuple[int, ...]) -> PlacedStage:
    """The simulator's figures."""
    names = chain.names
    ends = [cut for cut in (begin, end) if 0 < cut < len(names)]
    edges = [0, *ends, len(names)]
    specs = [
        StageSpec(
            names[first:last],
            (f"d{number}",),
            tuple(names[layer] for layer in recompute if first <= layer < last),
        )
        for number, (first, last) in enumerate(pairwise(edges))
    ]
    return place(chain.problem, specs).stages[edges.index(begin)]


def placed_stash_bytes(chain: Chain, begin: int, end: int, recompute: tuple[int, ...]) -> int:
    return placed_stage(chain, begin, end, recompute).stash_bytes


def extra_s(chain: Chain, layers: tuple[int, ...], kind: str) -> float:
    return float(chain.forward_s(kind)[list(layers)].sum())


def least_extra_s(chain: Chain, begin: int, end: int, kind: str, room_bytes: int) -> float:
    fitting = (
        layers
        for layers in subsets(range(begin, end))
        if placed_stash_bytes(chain, begin, end, layers) <= room_bytes
    )
    return min((extra_s(chain, layers, kind) for layers in fitting), default=float("inf"))


@st.composite
def stages(draw: st.DrawFn) -> tuple[Chain, int, int]:
    chain = chain_of(draw(layer_graphs(max_layers=7)))
    begin = draw(st.integers(0, chain.length - 1))
    return chain, begin, draw(st.integers(begin + 1, chain.length))


@given(stages(), st.data())
def test_the_stash_of_every_choice_is_the_simulators(
    stage: tuple[Chain, int, int], data: st.DataObject
) -> None:
    chain, begin, end = stage
    layers = tuple(sorted(data.draw(st.sets(st.integers(begin, end - 1)))))
    expected = placed_stash_bytes(chain, begin, end, layers)
    assert chain.stashes.stage(begin, end).bytes(layers) == expected


@given(stages())
def test_no_choice_keeps_less_than_the_least(stage: tuple[Chain, int, int]) -> None:
    chain, begin, end = stage
    model = chain.stashes
    kept = [placed_stash_bytes(chain, begin, end, layers) for layers in subsets(range(begin, end))]
    assert model.kept_bytes[begin:end].sum() + model.received_bytes[begin] <= min(kept)
    least = model.least_by_interval()[begin, end]
    assert least <= min(kept)
    if not model.stage(begin, end).joint:
        saved = [max(0, x) for x in model.stage(begin, end).saving_bytes]
        assert model.stage(begin, end).fixed_bytes - sum(saved) == min(kept)


@given(stages())
def test_received_bytes_complete_the_layers_own(stage: tuple[Chain, int, int]) -> None:
    chain, begin, end = stage
    layers = chain.problem.graph.record.layers[begin:end]
    own = sum(layer.stash_bytes for layer in layers)
    received = int(chain.stashes.received_by_interval()[begin, end])
    assert own + received == placed_stash_bytes(chain, begin, end, ())


@given(stages(), st.data())
def test_the_choice_takes_the_least_extra_time_that_fits(
    stage: tuple[Chain, int, int], data: st.DataObject
) -> None:
    chain, begin, end = stage
    kind = data.draw(st.sampled_from(TYPES))
    chooser = RecomputeChooser(chain, counts_workspace=False)
    most = placed_stash_bytes(chain, begin, end, ())
    for _ in range(3):  # Later questions may be answered from memory.
        share, in_flight = data.draw(st.floats(-0.1, 1.1)), data.draw(st.integers(1, 3))
        room_bytes = int(share * most)
        holding = Holding(begin, end, (kind,), in_flight)
        found = chooser.choose([holding], in_flight * room_bytes + in_flight - 1)
        best = least_extra_s(chain, begin, end, kind, room_bytes)
        if found is None:
            assert best == float("inf")
            assert chooser.fits_never(holding, room_bytes)
        else:
            each = placed_stash_bytes(chain, begin, end, found.layers)
            assert found.stash_bytes == in_flight * each
            assert each <= room_bytes
            assert found.extra_s == pytest.approx(extra_s(chain, found.layers, kind))
            assert found.extra_s <= best * (1 + TOLERANCE) + 1e-15
            assert found.is_least


@given(stages(), st.floats(0, 1.1), st.integers(1, 3))
def test_what_layers_hold_while_they_run_again_finds_room_too(
    stage: tuple[Chain, int, int], share: float, in_flight: int
) -> None:
    """A choice is found wherever recomputing all that saves memory fits, if not the least."""
    chain, begin, end = stage
    least_bytes = placed_stage(chain, begin, end, ()).workspace_bytes

    def held_bytes(layers: tuple[int, ...]) -> int:
        placed = placed_stage(chain, begin, end, layers)
        return in_flight * placed.stash_bytes + placed.workspace_bytes - least_bytes

    room_bytes = int(share * max(held_bytes(layers) for layers in subsets(range(begin, end))))
    holding = Holding(begin, end, ("fast",), in_flight)
    found = RecomputeChooser(chain).choose([holding], room_bytes)
    fitting = [x for x in subsets(range(begin, end)) if held_bytes(x) <= room_bytes]
    saving = chain.stashes.stage(begin, end).saving_bytes
    every = tuple(begin + k for k, bytes_ in enumerate(saving) if bytes_ > 0)
    assert (found is not None) or every not in fitting
    if found is not None:
        best_s = min(extra_s(chain, layers, "fast") for layers in fitting)
        assert held_bytes(found.layers) == found.held_bytes <= room_bytes
        assert found.extra_s >= best_s * (1 - 1e-9)
        assert not found.is_least or found.extra_s <= best_s * (1 + TOLERANCE) + 1e-15


@given(layer_graphs(min_layers=3, max_layers=6), st.floats(0, 1), st.integers(1, 3))
def test_two_stages_of_a_device_share_its_room(
    graph: LayerGraph, share: float, in_flight: int
) -> None:
    chain = chain_of(graph)
    cut = chain.length // 2
    holdings = [Holding(0, cut, ("fast",), in_flight), Holding(cut, chain.length, ("fast",))]

    def both_bytes(layers: tuple[int, ...]) -> int:
        first = placed_stash_bytes(chain, 0, cut, tuple(x for x in layers if x < cut))
        second = placed_stash_bytes(chain, cut, chain.length, tuple(x for x in layers if x >= cut))
        return in_flight * first + second

    room_bytes = int(share * both_bytes(()))
    fitting = [x for x in subsets(range(chain.length)) if both_bytes(x) <= room_bytes]
    found = RecomputeChooser(chain, counts_workspace=False).choose(holdings, room_bytes)
    if found is None:
        assert not fitting
    else:
        assert both_bytes(found.layers) == found.stash_bytes <= room_bytes
        best = min(extra_s(chain, layers, "fast") for layers in fitting)
        assert found.extra_s <= best * (1 + TOLERANCE) + 1e-15


def skips(count: int) -> LayerGraph:
    """Every layer's output is used by all that follow and saved by the layer itself."""
    names = [f"l{i}" for i in range(count)]
    size = [10 * 2**20 + 2**16 * (7 * i % 13) for i in range(count)]
    fields = dict.fromkeys(
        f"{step}_{what}"
        for step in ("forward", "input_gradient", "weight_gradient")
        for what in ("flops", "traffic_bytes")
    )
    layers = [
        {**dict.fromkeys(fields, 0), "name": name, "stash_bytes": 2 * size[i]}
        for i, name in enumerate(names)
    ]
    for i, row in enumerate(layers):
        row["forward_flops"] = 10**9 * (1 + 5 * i % 7)
    tensors = [
        {
            "name": f"t{i}",
            "producer": name,
            "users": names[i + 1 :],
            "bytes": size[i],
            "shape": [1],
            "dtype": "float32",
            "requires_grad": True,
            "saved_by": name,
        }
        for i, name in enumerate(names[:-1])
    ]
    return LayerGraph.parse(
        {
            "format": "pipeplan-graph/2",
            "name": "skips",
            "samples_per_microbatch": 1,
            "precision": "float32",
            "layers": layers,
            "boundaries": tensors,
            "parameters": [],
        }
    )


@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_a_choice_among_many_entangled_layers_fits_even_if_it_is_not_the_least(
    share: float,
) -> None:
    chain = chain_of(skips(60))
    stash = chain.stashes.stage(0, 60)
    found = RecomputeChooser(chain).choose(
        [Holding(0, 60, ("fast",))], int(share * stash.fixed_bytes)
    )
    assert isinstance(found, Recomputation)
    assert stash.bytes(found.layers) <= share * stash.fixed_bytes


# --- the knapsack ---------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-3, 9)), max_size=9), st.integers(-3, 40))
def test_the_cheapest_cover_is_the_best_of_all(items: list[tuple[int, int]], need: int) -> None:
    cost = np.array([c for c, _ in items], dtype=float)
    saving = np.array([s for _, s in items], dtype=np.int64)
    best = min(
        (
            sum(items[i][0] for i in chosen)
            for chosen in subsets(range(len(items)))
            if sum(items[i][1] for i in chosen) >= need
        ),
        default=None,
    )
    found = cheapest_cover(cost, saving, need)
    if found is None:
        assert best is None
    else:
        assert saving[list(found.items)].sum() >= need or need <= 0
        assert found.cost == pytest.approx(sum(items[i][0] for i in found.items))
        assert found.cost == best
