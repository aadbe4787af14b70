"""What a launch refuses about buffers that forward writes, plan and verify refuse before."""

from dataclasses import replace

import pytest
import torch
from executor_plans import FOUR_DEVICES, pipeline_of, scheduled
from in_turn import MEAN_SQUARES, Rows, cut_everywhere
from torch import Tensor, nn
from traces import trace_once

from executor.stage.runner import StageRunner
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.problem import Problem
from planner.search.solve import solve
from planner.verification import verify


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(rows.mean(0), alpha=0.1)
        return self.linear(rows - self.mean)


def running_means() -> nn.Module:
    return Rows(nn.Linear(4, 4), RunningMean(), nn.Linear(4, 4))


def plan_of(devices: str = "d2", again: tuple[str, ...] = (), **job: object) -> Plan:
    graph = trace_once(running_means, MEAN_SQUARES)
    stages = [(["h.0"], ["d1"]), (["h.1", "h.2", "loss"], devices.split(), again)]
    return scheduled(pipeline_of(graph, None, stages, microbatches=2, loss="mse", **job))


def test_the_layer_that_writes_a_buffer_is_in_the_graph() -> None:
    layers = trace_once(running_means, MEAN_SQUARES).record.layers
    assert [layer.writes for layer in layers] == [(), ("h.1.mean",), (), ()]


def test_one_device_in_order_is_allowed() -> None:
    assert verify(plan_of()) == []
    assert verify(plan_of(again=("h.2",))) == []


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda: plan_of("d2 d3"), "replicas each for themselves; give it a single device"),
        (lambda: plan_of(again=("h.1",)), "recomputed layers would read changed"),
        (
            lambda: replace_order(plan_of()),
            "'h.1.mean': orders['d2'] must have its microbatches in order",
        ),
    ],
    ids=["replicas", "recompute", "order"],
)
def test_a_plan_that_would_change_the_buffer_is_refused(plan, words: str) -> None:
    assert any(words in problem for problem in verify(plan()))


def replace_order(plan: Plan) -> Plan:
    return plan.model_copy(update={"orders": {**plan.orders, "d2": "1F1 1B1 1F0 1B0"}})


def test_a_search_with_replicas_or_recomputation_is_refused_first() -> None:
    graph = trace_once(running_means, MEAN_SQUARES)
    problem = Problem(graph, FOUR_DEVICES, MEAN_SQUARES)
    with pytest.raises(PipeplanError, match=r"writes h\.1\.mean .* replication = false and"):
        solve(problem, time_limit_s=0.1, deterministic=True)
    job = MEAN_SQUARES.model_copy(update={"replication": False, "recompute": False})
    result = solve(replace(problem, job=job), time_limit_s=0.1, deterministic=True)
    assert verify(result.plan) == []


class WarmUp(Rows):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, rows: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(rows) * self.count


def test_what_a_stage_sent_of_a_buffer_stays_when_the_next_microbatch_writes_it() -> None:
    _, cut_model, layers = cut_everywhere(WarmUp)
    runner = StageRunner(cut_model([layers[:1], layers[1:]])[0], microbatches=2)
    sent = [runner.forward(number, (), {"rows": torch.ones(5, 4)}) for number in range(2)]
    counts = [int(x) for tensors in sent for x in tensors if x.dtype == torch.long]
    assert counts == [1, 2]
