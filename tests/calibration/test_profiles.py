"""Costs files in a layer graph: medians in place of the roofline, for the type they are of."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import boundary, cluster, device_type, graph, layer

from planner.cluster.cluster import Cluster
from planner.costs.roofline import layer_times
from planner.errors import PipeplanError
from planner.interop.measured_costs import (
    read_costs,
    warn_of_types_without_costs,
    with_costs,
    with_profile,
)
from planner.model.figures import PHASES
from planner.model.graph_record import graph_digest, structure_digest
from planner.model.layer_graph import LayerGraph
from planner.model.length_graph import record_at
from planner.model.measured_costs import Costs


def costs_of(the_graph: LayerGraph, seconds: dict[str, float], **fields: Any) -> Costs:
    """A profile at the graph's size; a backward takes twice a forward."""
    samples = the_graph.record.samples_per_microbatch

    def timing(value: float) -> dict[str, Any]:
        return {"median_s": value, "low_s": value, "high_s": value, "repeats": 3}

    kinds = [
        {
            "layers": [name],
            "sizes": [
                {
                    "samples_per_microbatch": samples,
                    "forward_flops": the_graph.layers[name].forward_flops,
                    "forward": timing(value),
                    "backward": timing(2 * value),
                    "input_gradient": timing(1.5 * value),
                    "weight_gradient": timing(value),
                    "stash_bytes": 1,
                    "weight_stash_bytes": 1,
                    "forward_bytes": 1,
                    "backward_bytes": 1,
                }
            ],
        }
        for name, value in seconds.items()
    ]
    data = {
        "format": "pipeplan-costs/1",
        "model": "small",
        "precision": the_graph.record.precision,
        "device_type": "unit",
        "hardware": "a processor",
        "made_with": {},
        "date": "2026-11-22",
        "kinds": kinds,
        **fields,
    }
    return Costs.parse(data)


def of_lengths(the_graph: LayerGraph, seconds: dict[str, tuple[float, ...]]) -> Costs:
    """A profile at each of the graph's lengths, of forwards of so many seconds."""
    kinds: list[dict[str, Any]] = []
    for number, (tokens, _) in enumerate(the_graph.record.lengths):
        alone = LayerGraph.from_record(record_at(the_graph.record, number))
        costs = costs_of(alone, {name: row[number] for name, row in seconds.items()})
        rows = costs.model_dump(mode="json")["kinds"]
        kinds = kinds or [{**row, "sizes": []} for row in rows]
        for kind, row in zip(kinds, rows, strict=True):
            kind["sizes"].append({**row["sizes"][0], "tokens": tokens})
    return costs_of(the_graph, dict.fromkeys(seconds, 0.0), kinds=kinds)


def unequal(**flops: tuple[int, int]) -> LayerGraph:
    """A chain of layers by their FLOPs in each phase at 4 tokens (three in four) and at 8."""

    def work(count: int) -> list[dict[str, Any]]:
        row = {"operation_class": "product", "operations": 1, "flops": count, "traffic_bytes": 0}
        return [{**row, "phase": phase} for phase in PHASES]

    lengths = [{"tokens": 4, "share": 0.75}, {"tokens": 8, "share": 0.25}]
    rows = [
        {
            **layer(name, 0, 0),
            **{f"{phase}_flops": counts[-1] for phase in PHASES},
            "work": work(counts[-1]),
            "lengths": [{**a, "work": work(n)} for a, n in zip(lengths, counts, strict=True)],
        }
        for name, counts in flops.items()
    ]
    sent = [
        {**boundary(*pair, bytes_=8), "lengths": [{**a, "bytes": a["tokens"]} for a in lengths]}
        for pair in pairwise(flops)
    ]
    return graph(rows, sent)


GRAPH = graph([layer("a", 1, 2), layer("b", 3, 4)])
UNEQUAL = unequal(first=(100, 300), second=(500, 700))
CLUSTER = cluster(["d0"], [])


def times(found: LayerGraph, name: str, the_cluster: Cluster = CLUSTER) -> tuple[float, ...]:
    kind = the_cluster.device_types["unit"]
    row = layer_times(found.layers[name], "unit", kind, found.record.precision)
    return row.forward_s, row.input_gradient_s, row.weight_gradient_s, row.backward_s


def test_medians_stand_in_for_the_roofline() -> None:
    found = with_profile(GRAPH, CLUSTER, costs_of(GRAPH, {"a": 5.0, "b": 7.0}), "costs.json")
    assert times(found, "a") == (5.0, 7.5, 5.0, 10.0)
    assert times(found, "b") == (7.0, 10.5, 7.0, 14.0)
    assert times(GRAPH, "a")[0] == pytest.approx(1.0)


def test_profiles_of_several_types_stand_side_by_side() -> None:
    other = cluster(["d0"], [], types={"unit": device_type(), "slow": device_type()})
    first = with_profile(GRAPH, other, costs_of(GRAPH, {"a": 5.0, "b": 7.0}), "one")
    slow = costs_of(GRAPH, {"a": 50.0, "b": 70.0}, device_type="slow")
    both = with_profile(first, other, slow, "two").layers["a"].measured
    assert {name: row.forward_s for name, row in both.items()} == {"unit": 5.0, "slow": 50.0}


def test_a_layer_keeps_what_was_measured_where_that_is_more() -> None:
    small = graph([layer("a", 1, 2, stash_bytes=0), layer("b", 1, 2, stash_bytes=100)])
    found = with_profile(small, CLUSTER, costs_of(small, {"a": 1.0, "b": 1.0}), "costs.json")
    rows = {row.name: row for row in found.record.layers}
    assert (rows["a"].stash_bytes, rows["b"].stash_bytes) == (1, 100)
    assert rows["a"].kept_for_weights_bytes == 1


def test_weight_gradients_keep_no_more_than_was_measured_and_given() -> None:
    """Of b: 1 byte measured, 7 of one input, 3 of one that its maker lets go, 5 given back."""
    rows = [
        layer("a", 1, 2),
        layer("b", 1, 2, stash_bytes=100, weight_stash_bytes=90),
        layer("c", 1, 2, stash_bytes=100, weight_stash_bytes=4),
    ]
    cuts = [
        boundary("a", "b", name="kept", bytes_=7, saved_by="b"),
        boundary("a", "b", name="lent", bytes_=3, saved_by="a"),
        boundary("b", "c", bytes_=5),
    ]
    small = graph(rows, cuts)
    found = with_profile(small, CLUSTER, costs_of(small, dict.fromkeys("abc", 1.0)), "costs.json")
    assert found.layers["b"].kept_for_weights_bytes == 1 + 7 + 3 + 5
    assert found.layers["c"].kept_for_weights_bytes == 1  # Measured; the trace knew no better.


def test_the_peak_is_the_measured_one_with_what_the_layer_was_given() -> None:
    """Of b: 30 bytes in its backward, 7 of the input it keeps, 5 of the gradient it is given."""
    rows = [layer("a", 1, 2), layer("b", 1, 2, stash_bytes=10), layer("c", 1, 2)]
    cuts = [boundary("a", "b", bytes_=7, saved_by="b"), boundary("b", "c", bytes_=5)]
    small = graph(rows, cuts)
    costs = costs_of(small, {"a": 1.0, "b": 1.0, "c": 1.0})
    kinds = [
        kind.model_copy(
            update={"sizes": (kind.sizes[0].model_copy(update={"backward_bytes": 30}),)}
        )
        for kind in costs.kinds
    ]
    found = with_profile(
        small, CLUSTER, costs.model_copy(update={"kinds": tuple(kinds)}), "costs.json"
    )
    assert found.layers["b"].peak_bytes == 30 + 7 + 5
    # Never less than the stash that was traced, nor than another type's peak.
    heavy = graph([layer("a", stash_bytes=90), layer("b", peak_bytes=80)], [])
    rows_of = with_profile(heavy, CLUSTER, costs_of(heavy, {"a": 1.0, "b": 1.0}), "costs.json")
    assert [row.peak_bytes for row in rows_of.record.layers] == [90, 80]


@pytest.mark.parametrize(
    ("costs", "told"),
    [
        (
            costs_of(GRAPH, {"a": 1, "b": 1}, precision="bfloat16"),
            "costs.json: precision: 'bfloat16', the job's is 'float32'",
        ),
        (
            costs_of(GRAPH, {"a": 1, "b": 1}, device_type="H200"),
            r"costs.json: device_type: 'H200' is not a device type of the cluster \(unit\)",
        ),
        (
            costs_of(graph([layer("a", 9, 2), layer("b", 3, 4)]), {"a": 1, "b": 1}),
            "costs.json: kinds: layer 'a' had .* forward FLOPs when it was profiled",
        ),
        (costs_of(GRAPH, {"a": 1}), "costs.json: kinds: layer 'b' is in none of them"),
        (
            costs_of(GRAPH, {"a": 1, "b": 1}, hardware="another processor"),
            "costs.json: hardware: 'another processor' was profiled, the cluster's unit is 'a pro",
        ),
    ],
)
def test_costs_of_something_else_are_refused(costs: Costs, told: str) -> None:
    measured = cluster(["d0"], [], types={"unit": device_type(hardware="a processor")})
    with pytest.raises(PipeplanError, match=told):
        with_profile(GRAPH, measured, costs, "costs.json")


def test_between_two_sizes_the_work_has_to_lie_between_theirs() -> None:
    """Profiled with 1 and 3 samples; the model, of 2, has more FLOPs than even 3 had."""
    kinds = []
    for kind in costs_of(GRAPH, {"a": 1, "b": 1}).kinds:
        (row,) = kind.sizes
        sizes = [
            row.model_copy(update={"samples_per_microbatch": count, "forward_flops": flops})
            for count, flops in ((1, row.forward_flops // 4), (3, row.forward_flops // 2))
        ]
        kinds.append(kind.model_copy(update={"sizes": tuple(sizes)}))
    costs = costs_of(GRAPH, {"a": 1, "b": 1}).model_copy(update={"kinds": tuple(kinds)})
    record = GRAPH.record.model_copy(update={"samples_per_microbatch": 2})
    with pytest.raises(PipeplanError, match=r"layer 'a' had \d+ to \d+ forward FLOPs"):
        with_profile(LayerGraph.from_record(record), CLUSTER, costs, "costs.json")


def test_a_device_type_without_costs_is_told(caplog: pytest.LogCaptureFixture) -> None:
    two = cluster(
        {"d0": "unit", "d1": "slow"}, [], types={"unit": device_type(), "slow": device_type()}
    )
    warn_of_types_without_costs(GRAPH, two, "two.toml")
    assert not caplog.messages  # Nothing was measured at all.
    found = with_profile(GRAPH, two, costs_of(GRAPH, {"a": 5.0, "b": 7.0}), "costs.json")
    warn_of_types_without_costs(found, two, "two.toml")
    (said,) = caplog.messages
    assert said.startswith("two.toml: no times were measured on device type slow: they are pred")
    assert "profile the model there with --type slow" in said


def test_a_file_is_read_by_its_format(tmp_path: Path) -> None:
    profile, calibrated = tmp_path / "costs.json", tmp_path / "graph.json"
    costs_of(GRAPH, {"a": 5.0, "b": 7.0}).save(profile)
    found = with_costs(GRAPH, CLUSTER, read_costs(profile, "--costs"))
    assert times(found, "a")[0] == 5.0
    found.save(calibrated)
    assert times(with_costs(GRAPH, CLUSTER, read_costs(calibrated, "--costs")), "b")[0] == 7.0
    calibrated.write_text(json.dumps({"format": "pipeplan/1"}))
    with pytest.raises(PipeplanError, match=r"--costs .*graph\.json: .*a plan"):
        with_costs(GRAPH, CLUSTER, read_costs(calibrated, "--costs"))


def test_a_layer_of_several_lengths_has_the_times_of_each() -> None:
    seconds = {"first": (1.0, 2.0), "second": (3.0, 7.0)}
    found = with_profile(UNEQUAL, CLUSTER, of_lengths(UNEQUAL, seconds), "costs.json")
    for name, (short_s, long_s) in seconds.items():
        for number, forward_s in enumerate((short_s, long_s)):
            alone = LayerGraph.from_record(record_at(found.record, number))
            expected = [times * forward_s for times in (1, 1.5, 1, 2)]
            assert times(alone, name) == pytest.approx(expected)
        assert times(found, name)[0] == pytest.approx(0.75 * short_s + 0.25 * long_s)
    assert structure_digest(found.record) == structure_digest(UNEQUAL.record)
    assert graph_digest(found.record) != graph_digest(UNEQUAL.record)
    assert LayerGraph.parse(found.record.model_dump(mode="json")).record == found.record


def test_a_profile_without_one_of_the_lengths_is_refused() -> None:
    seconds = {"first": (1.0, 2.0), "second": (3.0, 7.0)}
    whole = of_lengths(UNEQUAL, seconds).model_dump(mode="json")
    for kind in whole["kinds"]:
        del kind["sizes"][0]
    with pytest.raises(PipeplanError, match=r"costs\.json: kinds: nothing .* at 4 tokens"):
        with_profile(UNEQUAL, CLUSTER, Costs.parse(whole), "costs.json")
    one = costs_of(UNEQUAL, dict.fromkeys(seconds, 1.0))
    with pytest.raises(PipeplanError, match=r"at 4 tokens; run `pipeplan profile` with the job"):
        with_profile(UNEQUAL, CLUSTER, one, "costs.json")
    of_another = costs_of(GRAPH, {"a": 5.0, "b": 7.0}).model_dump(mode="json")
    for kind in of_another["kinds"]:
        kind["sizes"][0]["tokens"] = 4
    with pytest.raises(PipeplanError, match=r"measured: none of one length\)"):
        with_profile(GRAPH, CLUSTER, Costs.parse(of_another), "costs.json")


def test_a_profile_of_other_work_at_a_length_is_refused() -> None:
    whole = of_lengths(UNEQUAL, {"first": (1.0, 2.0), "second": (3.0, 7.0)}).model_dump(mode="json")
    whole["kinds"][1]["sizes"][0]["forward_flops"] += 1
    with pytest.raises(PipeplanError, match=r"layer 'second' had .* forward FLOPs when it was"):
        with_profile(UNEQUAL, CLUSTER, Costs.parse(whole), "costs.json")
