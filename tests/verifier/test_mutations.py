"""A mistake in the simulator or in the costs makes plans that the verifier refuses."""

from __future__ import annotations

import inspect
import textwrap
from types import FunctionType
from typing import Any

import pytest
from many_sided import many_sided_plans
from test_agreement import assert_they_agree

from planner.cluster.cluster import Link
from planner.cluster.routing import Routing
from planner.costs import (
    network_table,
    optimizer,
    placement,
    roofline,
    stage_table,
)
from planner.costs.gradients import gradient_bytes
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.stage_table import StageTable
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.program import stage_rows
from planner.program.lower import gradient_tables
from planner.simulation import timeline
from planner.verification import verify

FIGURES = placement._StageFigures
ARRAYS: Any = inspect.unwrap(stage_table.layer_arrays)


def without(bytes_: str) -> tuple[Any, str, str]:
    """Figures of stages that lack some bytes."""
    figure = "min(getattr(stage, field), MOST_BYTES)"
    return stage_rows._fill_stages, figure, f'{figure} * (field != "{bytes_}_bytes")'


MUTATIONS: dict[str, tuple[Any, str, str]] = {
    "a message has no latency": (network_table._Routes._fill, "= route.latency_s", "= 0.0"),
    "a message has no bytes": (PlacedPipeline.received, "row.sent_bytes", "0 * row.sent_bytes"),
    "the latency of the middle of a route is left out": (
        Routing._route_between_ports,
        "middle.latency_s + ends_us",
        "ends_us",
    ),
    "the last link of a route is not held": (
        network_table._Routes._number_port,
        "self.last[number] =",
        "_ =",
    ),
    "a route is the narrowest": (
        Routing._route_between_switches,
        "min(width_gb_per_s, widest.bandwidth_gb_per_s)",
        "0.0",
    ),
    "half duplex is taken for full": (Link.direction_from, '"half"', '"neither"'),
    "full duplex is taken for half": (Link.direction_from, '"half"', '"full"'),
    "a shared link is held": (Routing._resource, "() if link.shared else ", ""),
    "a device has any number of streams": (
        stage_rows.set_rules,
        'behaviour.streams == "one"',
        "False",
    ),
    "a message takes no host time": (
        PlacedPipeline.received_s,
        "self.behaviour.message_s(bytes_)",
        "0.0",
    ),
    "an operation takes no host time": (FIGURES._times_on, "+ self._host_s", ""),
    "activations are charged for gradients": (
        PlacedPipeline.received,
        "row.returned_bytes",
        "row.input_bytes",
    ),
    "buckets are twice as large": (
        gradient_tables.set_buckets,
        "bucket_bytes or 0.0",
        "2 * (bucket_bytes or 0.0)",
    ),
    "the batch is not copied": (roofline._roofline, "device.copy_s(layer.batch_bytes)", "0.0"),
    "tied parameters are reduced by each stage": (
        gradient_tables._users,
        "users[held[entry]].append(layer)",
        "users[held[entry]] = [layer]",
    ),
    "frozen parameters are stepped": (
        optimizer.optimizer_s,
        " if p.trainable}",
        "}",
    ),
    "the optimizer does not read gradients": (
        optimizer.step_traffic_bytes,
        " + gradient_bytes(job, parameter)",
        "",
    ),
    "a forward is not repeated where its layer is recomputed": (
        FIGURES._times_on,
        'KINDS.index("B"), ',
        "",
    ),
    "nor in an input gradient": (FIGURES._times_on, ', KINDS.index("I")', ""),
    "there is no ramp-up": (roofline.work_s, "work.operations * reached.ramp_up_us * 1e-6", "0"),
    "there is no overhead": (roofline.work_s, "+ overhead_s", ""),
    "bandwidth and throughput add up": (
        roofline.work_s,
        "max(arithmetic_s, work.traffic_bytes / bytes_per_s)",
        "arithmetic_s + work.traffic_bytes / bytes_per_s",
    ),
    "a causal mask saves nothing": (
        roofline.work_s,
        "EXECUTED.get(work.operation_class, 1.0)",
        "1.0",
    ),
    "convolutions do not use tf32": (
        roofline._peak_tflop_per_s,
        "peak_tflop_per_s[TF32]",
        "peak_tflop_per_s[precision]",
    ),
    "classes of operations are all alike": (roofline.reach, "device.by_class.get(of)", "None"),
    "a layer keeps weights twice": (
        placement.static_bytes,
        "total += -(-row.bytes // parts)",
        "total += 2 * -(-row.bytes // parts)",
    ),
    "gradients of 16-bit weights have 16 bits": (gradient_bytes, "if widens", "if False"),
    "weights are gathered in float32": (
        gradient_tables._gathered,
        "row.bytes for",
        "2 * row.bytes for",
    ),
    "there is no optimizer state": (
        placement.static_bytes,
        "per_element * -(-row.elements // count)",
        "0",
    ),
    "nobody shares state": (placement.state_holders, "> 1}", "> 9}"),
    "a step is on all of a shared state": (
        optimizer._step_s,
        "/ holders.get(p.name, 1)",
        "",
    ),
    "low precision has no masters": (
        Job.optimizer_bytes_per_element.fget,
        "masters = 1",
        "masters = 0",
    ),
    "the stash is forgotten": without("stash"),
    "a received tensor counts twice": without("input"),
    "a received gradient is forgotten": without("output_gradient"),
    "an output is forgotten": without("output"),
    "the weight stash is forgotten": without("weight_stash"),
    "an input gradient apart takes no more": (
        PlacedPipeline.split_extra_bytes,
        "max(0, self",
        "min(0, self",
    ),
    "a byte too little": (timeline._accumulated, "[static, ", "[static - 10**6, "),
    "the workspace is forgotten": (ARRAYS, '"peak": peak', '"peak": 0 * peak'),
    "a recomputed layer keeps its stash": (
        StageTable._of_given,
        "NEVER * (name not in again)",
        "NEVER",
    ),
    "what a recomputed layer starts from is forgotten": (
        stage_table._tensors,
        "made[producer[-1]].append(n)",
        "pass",
    ),
    "a saved input counts twice": (stage_table._tensors, "kept[saver[-1]].append(n)", "pass"),
    "a tensor is sent to its first user only": (
        stage_table._cuts,
        "max(place[user]",
        "min(place[user]",
    ),
    "every tensor has a gradient": (stage_table._cuts, "back = row.requires_grad", "back = True"),
    "a peak leaves out what is handed on": (
        LayerGraph.peak_bytes.func,
        "2 * tensor.bytes",
        "tensor.bytes",
    ),
    "a whole backward takes what its halves do": (
        roofline.computed_times,
        "measured.whole_backward_s",
        "measured.input_gradient_s + measured.weight_gradient_s",
    ),
    "idle time is taken over one device too few": (
        timeline.Timeline.bubble.fget,
        "len(self.end_s)",
        "(len(self.end_s) + 1)",
    ),
}


def mutated(function: FunctionType, old: str, new: str) -> Any:
    """Return the code of a function with a piece of its text replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{old!r} is no longer in {function.__qualname__}"
    names = dict(function.__globals__)
    text = source[source.index("def ") :].replace(old, new)
    exec("from __future__ import annotations\n" + text, names)  # noqa: S102
    return names[function.__name__].__code__


@pytest.mark.parametrize("name", MUTATIONS)
def test_plans_of_a_broken_simulator_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, old, new = MUTATIONS[name]
    monkeypatch.setattr(function, "__code__", mutated(function, old, new))
    assert any(verify(plan) for plan in many_sided_plans())


def test_plans_of_the_simulator_as_it_is_hold() -> None:
    for plan in many_sided_plans():
        assert verify(plan) == []
        assert_they_agree(plan)
