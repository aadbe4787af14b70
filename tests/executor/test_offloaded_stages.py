"""Stages that offload: the same losses and gradients, and what is copied is what the plan says."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from executor_plans import DEVICES, pipeline_of, scheduled
from in_turn import MEAN_SQUARES
from torch import Tensor, nn

from executor.launch.model import PlannedModel
from executor.split.model_split import cut
from executor.stage.runner import StageRunner
from models import ZOO
from planner.costs.placement import place_plan
from planner.job import Job
from planner.plan.plan import Plan, Stage
from planner.tracing.factory import example_batch, import_factory
from planner.tracing.trace import trace


class Blocks(nn.Module):
    """Blocks whose tensors are saved by several layers, by makers or by users, or skip ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            [
                nn.Linear(8, 16),
                nn.Tanh(),
                nn.Linear(16, 8),
                nn.LayerNorm(8),
                nn.ReLU(),
                nn.Linear(8, 8),
                nn.GELU(),
                nn.Linear(8, 4),
            ]
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of eight numbers through every layer, the fourth's result also past the next."""
        for number, layer in enumerate(self.h):
            skipped = rows if number == 4 else None
            rows = layer(rows)
            if skipped is not None:
                rows = rows + skipped
        return rows

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        """Random rows and targets."""
        return {"rows": torch.randn(samples, 8), "target": torch.randn(samples, 4)}


def planned(
    factory: Callable[[], nn.Module], job: Job, cuts: Sequence[int], away: set[int]
) -> Plan:
    """A plan of stages on devices of their own that offload the layers with some indices."""
    graph = trace(factory, job)
    names = list(graph.layers)
    bounds = [0, *cuts, len(names)]
    rows = [(names[a:b], [DEVICES[k]]) for k, (a, b) in enumerate(pairwise(bounds))]
    fields = {"microbatches": 2, "loss": job.loss}
    plan = scheduled(pipeline_of(graph, None, rows, **fields))
    offloaded = {names[k] for k in away if k < len(names)}

    def offloading(stage: Stage) -> Stage:
        chosen = tuple(name for name in stage.layers if name in offloaded)
        return stage.model_copy(update={"offload": chosen})

    return plan.model_copy(update={"stages": tuple(map(offloading, plan.stages))})


def run(plan: Plan, model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> tuple:
    """Losses, gradients, and by stage the bytes on the host while both microbatches are in flight.

    Both forwards run, then both backwards, one stage after the other.
    """
    model.zero_grad(set_to_none=True)
    stages = cut(*PlannedModel(plan, model).export(), plan, range(len(plan.stages)))
    runners = [StageRunner(stage, 2, offloaded=(0, 1)) for stage in stages]
    losses = []
    for microbatch, batch in enumerate(batches):
        values: tuple[Tensor, ...] = ()
        for runner in runners:
            values = runner.forward(microbatch, values, batch, seed=microbatch)
        losses.append(values[0])
    copied = [
        [
            sum(block.on_host.numel() for block in blocks)
            for blocks in runner._offload._away.values()
        ]
        for runner in runners
    ]
    assert all(
        block.on_device is None
        for runner in runners
        for blocks in runner._offload._away.values()
        for block in blocks
    )
    for microbatch in range(len(batches)):
        gradients: tuple[Tensor, ...] = ()
        for runner in reversed(runners):
            if microbatch == 0:
                runner.bring_back(microbatch)
            gradients = runner.backward(microbatch, gradients)
    for runner in runners:
        runner.require_empty()
        assert not runner._offload._away
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, found, copied


EVERY = set(range(100))
MOST_MORE = {"llama_tiny": 1.01, "t5_tiny": 1.25}
"""How many times as much is copied at most where the trace counts tensors otherwise, see check."""
CASES = {
    "all in one stage": ((), EVERY),
    "two stages": ((4,), EVERY),
    "every other layer": ((3,), set(range(0, 100, 2))),
    "neighbours in the middle": ((), {2, 3, 4, 5}),
    "the first of three stages": ((2, 5), {0, 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_that_offload_compute_the_same_and_copy_what_the_plan_says(case: str) -> None:
    check(Blocks, MEAN_SQUARES, *CASES[case])


@pytest.mark.extensive
@pytest.mark.parametrize("name", ["llama_tiny", "resnet_tiny", "unet_tiny", "t5_tiny"])
@pytest.mark.parametrize("away", [EVERY, {1, 2, 3}])
def test_the_zoo_offloads_its_stashes(name: str, away: set[int]) -> None:
    job = Job(samples_per_microbatch=2)
    check(import_factory(ZOO[name]), job, (2, 4), away, MOST_MORE.get(name, 1.0))


def check(
    factory: Callable[[], nn.Module],
    job: Job,
    cuts: Sequence[int],
    away: set[int],
    most_more: float = 1.0,
) -> None:
    """Compare with the same stages that offload nothing, bit by bit.

    What is copied is what the plan says, or more in models whose tensors the trace counts
    otherwise. Tables that several layers save (LLaMA's rotary embedding) are counted in the first
    of them. Of T5, a tensor behind a dropout of nothing is taken off as if it were two, and the
    trace counts what fused attention saves, which CPUs do not have for a mask that is trained.
    """
    torch.manual_seed(3)
    model = factory().train()
    batches = [example_batch(model, job) for _ in range(2)]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = run(planned(factory, job, cuts, set()), model, batches)
    model.load_state_dict(state)
    plan = planned(factory, job, cuts, away)
    offloaded = run(plan, model, batches)
    assert all(map(torch.equal, offloaded[0], plain[0]))
    for name, gradient in plain[1].items():
        found = offloaded[1][name]
        assert (found is None) == (gradient is None), name
        assert gradient is None or torch.equal(found, gradient), name
    expected = [row.offload_bytes for row in place_plan(plan).stages]
    assert any(expected)
    for (first, second), bytes_ in zip(offloaded[2], expected, strict=True):
        assert bytes_ <= first == second <= bytes_ * most_more
