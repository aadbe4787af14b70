"""Ranks, hosts and devices are compared with each other and with the plan before they train."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from builders import cluster, device_type, graph, layer, link, parameter, pipeline
from executor_plans import scheduled

from executor.distributed.machines import (
    Machine,
    agreed_backend,
    require_machines,
    warn_of_machines,
)
from executor.distributed.process_group import process_group
from planner.cluster.hardware import GIB
from planner.errors import PipeplanError
from planner.plan.plan import Plan


def gpu(number: int, host: str = "h0", **fields: object) -> Machine:
    whole = Machine(host, "cuda", None, True, f"{host} GPU-{number}", "NVIDIA A100", 80 * GIB)
    return replace(whole, **fields)


CPUS = [Machine("h0", "cpu", None, True)] * 2


@pytest.mark.parametrize(
    ("machines", "backend"),
    [
        (CPUS, "gloo"),
        ([gpu(0), gpu(1)], "nccl"),
        ([gpu(0), gpu(0)], "gloo"),
        # One visible GPU a process: each is number 0 of its own.
        ([gpu(0, "h0"), gpu(0, "h1")], "nccl"),
        # A host with fewer GPUs than processes: no rank may choose otherwise than the others.
        ([gpu(0), gpu(1), gpu(0, "h1"), gpu(0, "h1")], "gloo"),
        ([gpu(0), gpu(1, has_nccl=False)], "gloo"),
        ([gpu(0, asked="nccl"), gpu(1, asked="nccl")], "nccl"),
        ([gpu(0, asked="gloo"), gpu(1, asked="gloo")], "gloo"),
    ],
)
def test_all_ranks_take_one_backend(machines: Sequence[Machine], backend: str) -> None:
    assert agreed_backend(machines) == backend


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        (
            [gpu(0), CPUS[0]],
            "device: 'cuda' of ranks 0, 'cpu' of ranks 1; ranks of one training need devices of "
            "one kind; make GPUs visible to all, or use --device cpu",
        ),
        (
            [gpu(0, asked="nccl"), gpu(1), gpu(2)],
            "backend: 'nccl' of ranks 0, None of ranks 1, 2; give all ranks the same --backend, "
            "or none",
        ),
        (
            [gpu(0, asked="nccl"), gpu(1, asked="nccl"), gpu(0, asked="nccl")],
            "backend: 'nccl', but ranks 0, 2 share a GPU of host h0; give each rank a GPU of its "
            "own",
        ),
    ],
)
def test_ranks_that_do_not_go_together_are_named(machines: Sequence[Machine], message: str) -> None:
    with pytest.raises(PipeplanError, match=re.escape(message)):
        agreed_backend(machines)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two nodes of two devices."""
    types = {"n0/gpu0": "unit", "n0/gpu1": "unit", "n1/gpu0": "other", "n1/gpu1": "other"}
    made = cluster(
        types,
        [link(name, "hub") for name in types],
        ["hub"],
        {"unit": device_type(), "other": device_type()},
    )
    rows = [layer(f"l{k}", parameters=[f"p{k}"]) for k in range(4)]
    model = graph(rows, parameters=[parameter(f"p{k}") for k in range(4)])
    return scheduled(pipeline(model, made, [((f"l{k}",), (d,)) for k, d in enumerate(types)]))


def machines(hosts: str = "h0 h0 h1 h1") -> list[Machine]:
    return [gpu(rank, host) for rank, host in enumerate(hosts.split())]


def test_the_machines_that_were_planned_pass(plan: Plan) -> None:
    require_machines(plan, machines())
    require_machines(plan, [replace(CPUS[0], host=host) for host in ("h0", "h0", "h1", "h1")])


def test_a_node_whose_ranks_are_on_two_hosts_is_refused(plan: Plan) -> None:
    with pytest.raises(PipeplanError) as caught:
        require_machines(plan, machines("h0 h1 h0 h1"))
    assert caught.value.problems[0] == (
        "ranks: node 'n0' of the plan has ranks 0 on h0, ranks 1 on h1; start torchrun so that "
        "these 2 ranks are on one host, or plan for the nodes there are"
    )


def test_devices_of_one_type_that_are_different_gpus_are_refused(plan: Plan) -> None:
    found = machines()
    found[1] = replace(found[1], gpu_name="NVIDIA T4")
    with pytest.raises(PipeplanError, match="type 'unit' of the plan is NVIDIA A100 on ranks 0, "):
        require_machines(plan, found)
    both = [*machines()[:2], *(replace(m, gpu_name="NVIDIA T4") for m in machines()[2:])]
    require_machines(plan, both)


def test_a_gpu_with_less_memory_than_its_ranks_need_is_refused(plan: Plan) -> None:
    needed = [plan.predicted.devices[name].peak_memory_bytes for name in plan.ranks]
    found = machines()
    found[2] = replace(found[2], gpu_bytes=needed[2] - 1)
    with pytest.raises(PipeplanError, match=r"memory: ranks 2 take .* of host h1 has"):
        require_machines(plan, found)
    # Ranks that share a GPU share its memory.
    found = machines()
    shared = replace(found[0], gpu_bytes=max(needed[:2]))
    with pytest.raises(PipeplanError, match="memory: ranks 0, 1 take"):
        require_machines(plan, [shared, shared, *found[2:]])


def test_shared_gpus_and_nodes_on_one_host_are_told(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_machines(plan, [gpu(0), gpu(0), gpu(1), gpu(2)])
    told = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("ranks 0, 1 share a GPU of host h0") for text in told)
    assert any(text.startswith("host h0 runs the ranks of nodes n0, n1") for text in told)


def test_a_process_group_tells_what_its_ranks_run_on() -> None:
    with process_group(torch.device("cpu")) as found:
        (mine,) = found
        assert mine.kind == "cpu"
        with process_group(torch.device("cpu")) as again:
            assert again == found
