"""A loss of the user's own: traced, cut and trained as any other, imported only if allowed."""

import sys
from pathlib import Path

import pytest
import torch
from executor_plans import DEVICES, pipeline_of, scheduled
from in_turn import assert_same, run_stages, take_gradients
from torch import nn

from executor.launch.model import PlannedModel, allowed_loss
from executor.split.model_split import cut
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.factory import TrainingStep, example_batch
from planner.tracing.trace import trace

SOURCE = """
from torch.nn import functional

open({marker!r}, "w").close()

def smooth(output, target):
    return functional.smooth_l1_loss(output, target) + 0.1 * output.square().mean()

def rows(output, target):
    return (output - target).square().mean(1)

def number(output, target):
    return 1.5

def fails(output, target):
    return output @ target

def leaves(output, target):
    raise SystemExit(3)
"""


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def example_batch(self, samples: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(samples, 4), "target": torch.randn(samples, 3)}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once the user's module was imported."""
    found = tmp_path / "imported"
    (tmp_path / "loss_for_a_test.py").write_text(SOURCE.format(marker=str(found)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loss_for_a_test", raising=False)
    return found


def job(function: str = "smooth") -> Job:
    return Job(samples_per_microbatch=5, loss=f"loss_for_a_test:{function}")


def planned() -> Plan:
    graph = trace(Net, job())
    layers = list(graph.layers)
    stages = [(part, DEVICES[:1]) for part in (layers[:1], layers[1:])]
    return scheduled(pipeline_of(graph, None, stages, microbatches=1, loss=job().loss))


def test_stages_end_with_the_users_loss(marker: Path) -> None:
    plan = Plan.parse(planned().model_dump(mode="json"))
    torch.manual_seed(3)
    model = Net().train()
    own_loss = allowed_loss(plan, plan.job.loss)
    stages = cut(*PlannedModel(plan, model, own_loss).export(), plan, range(2))
    batch = example_batch(model, plan.job)
    output = model(batch["x"])
    smooth = nn.functional.smooth_l1_loss(output, batch["target"])
    expected = smooth + 0.1 * output.square().mean()
    expected.backward()
    alone = expected.detach(), take_gradients(model)
    assert_same(run_stages(model, stages, batch), alone)


def test_a_plan_imports_no_loss_unless_the_user_names_it(marker: Path) -> None:
    plan = planned()
    sys.modules.pop("loss_for_a_test")
    marker.unlink()
    with pytest.raises(PipeplanError, match="if you trust it, add --loss loss_for_a_test:smooth"):
        allowed_loss(plan, None)
    with pytest.raises(PipeplanError, match=r"--loss a:b: the plan was made for 'loss_for"):
        allowed_loss(plan, "a:b")
    with pytest.raises(PipeplanError, match="name it: --loss loss_for_a_test:smooth"):
        PlannedModel(plan, Net()).export()
    assert allowed_loss(plan, torch.dist) is torch.dist
    assert not marker.exists()
    assert allowed_loss(plan, "loss_for_a_test:smooth") is not None
    assert marker.exists()


def test_a_known_loss_takes_no_other() -> None:
    graph = trace(Net, Job(samples_per_microbatch=5, loss="mse"))
    plan = scheduled(
        pipeline_of(graph, None, [(list(graph.layers), DEVICES[:1])], microbatches=1, loss="mse")
    )
    assert allowed_loss(plan, None) is allowed_loss(plan, "mse") is None
    for other, shown in (("a:b", "a:b"), ("output", "output"), (nn.functional.l1_loss, "l1_loss")):
        with pytest.raises(PipeplanError, match=f"--loss {shown}: the plan was made for 'mse'"):
            allowed_loss(plan, other)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rows", r"loss = 'loss_for_a_test:rows' of Net is not a single number; let it return"),
        ("number", r"loss = 'loss_for_a_test:number' returned a float, expected a tensor"),
        ("fails", r"float32 \[5, 3\], and the target, float32 \[5, 3\]: .*loss_for_a_test.py:16\)"),
        ("leaves", r"cannot be taken of .*: SystemExit: 3 \(.*loss_for_a_test.py:19\)"),
        ("none", r"loss 'loss_for_a_test:none': module .* has no callable 'none'; it has smooth"),
    ],
)
def test_a_loss_that_fails_is_told_with_its_place(
    marker: Path, function: str, message: str
) -> None:
    with pytest.raises(PipeplanError, match=message):
        trace(Net, job(function))


@pytest.mark.parametrize("loss", ["l1", "", ":", "a:", ":b", "a:b:c"])
def test_a_job_names_a_known_loss_or_a_function(loss: str) -> None:
    message = r"loss: expected 'cross_entropy', 'mse', 'output' or module:function"
    with pytest.raises(PipeplanError, match=message):
        Job.parse({"loss": loss}, "job.toml")


def test_a_step_without_its_loss_is_refused() -> None:
    with pytest.raises(PipeplanError, match=r"loss = 'a:b' is not one of cross_entropy, mse"):
        TrainingStep(Net(), "a:b")
