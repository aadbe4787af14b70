"""Models of one's own in the current folder: found by name, described by the job, or refused."""

import textwrap
from pathlib import Path

import pytest

from planner.errors import PipeplanError
from planner.job import Job
from planner.tracing.trace import trace

OWN = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up = nn.Linear(6, width)
            self.down = nn.Linear(width, 3)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    class Described(Net):
        def example_batch(self, samples):
            return {"x": torch.randn(samples, 6), "target": torch.randint(3, (samples,))}

    class Fickle(Described):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    class OwnLoss(Described):
        def forward(self, x):
            return super().forward(x).square().mean()

    def net(width=4):
        return Net(width)

    def described(width=4):
        return Described(width)

    def fickle():
        return Fickle(4)

    def own_loss():
        return OwnLoss(4)

    def no_module():
        return {"a": 1}

    def picky(width):
        if width % 2:
            raise ValueError(f"width {width} must be even")
        return Net(width)

    number = 3
"""
INPUTS = """
[inputs.x]
shape = [6]
dtype = "float32"
"""
TARGET = """
[inputs.target]
shape = []
dtype = "int64"
below = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that lies in the current folder only."""
    name = f"own_module_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    return name


def job_from(text: str) -> Job:
    path = Path("job.toml")
    path.write_text('format = "pipeplan-job/1"\n' + text)
    return Job.load(path)


def test_a_model_of_the_current_folder_with_a_batch_by_the_job(own: str) -> None:
    job = job_from(f"samples_per_microbatch = 7\n[model_arguments]\nwidth = 5{INPUTS}{TARGET}")
    graph = trace(f"{own}:net", job)
    assert list(graph) == ["up", "down", "loss"]
    assert graph.name == "net"
    assert graph.layers["up"].forward_flops == 2 * 7 * 6 * 5


def test_a_model_of_the_current_folder_with_its_own_batch(own: str) -> None:
    graph = trace(f"{own}:described", Job(samples_per_microbatch=2), width=9)
    assert graph.layers["down"].forward_flops == 2 * 2 * 9 * 3


def test_the_jobs_inputs_go_before_the_models_own_batch(own: str) -> None:
    text = (INPUTS + TARGET).replace("shape = [6]", "shape = [2, 6]")
    graph = trace(f"{own}:described", job_from(text.replace("shape = []", "shape = [2]")))
    assert graph.layers["up"].forward_flops == 2 * 2 * 6 * 4


def test_a_model_may_return_its_own_loss(own: str) -> None:
    graph = trace(f"{own}:own_loss", job_from(f'loss = "output"\n{INPUTS}'))
    assert "loss" not in graph
    assert list(graph) == ["up", "down"]


def test_a_regression_needs_a_target_of_the_outputs_shape(own: str) -> None:
    target = TARGET.replace("shape = []", "shape = [3]").replace("int64", "float32")
    graph = trace(f"{own}:net", job_from(f'loss = "mse"\n{INPUTS}{target}'))
    assert list(graph) == ["up", "down", "loss"]


@pytest.mark.parametrize(
    ("factory", "job", "reason"),
    [
        ("fickle", "", "Python reads a value of a tensor there"),
        ("net", "", "has no example_batch(samples) method and the job lists no inputs"),
        ("net", INPUTS, "no 'target', which loss = 'cross_entropy' needs"),
        ("described", 'loss = "output"', "not a single number"),
        ("no_module", "", "the factory returned dict, expected a torch.nn.Module"),
        ("net", "[model_arguments]\nheight = 3", "height"),
        ("net", '[model_arguments]\nwidth = "wide"', "wide"),
        ("picky", "[model_arguments]\nwidth = 3", "width 3 must be even"),
        ("nothing", "", "no callable 'nothing'; it has"),
        ("number", "", "no callable 'number'"),
        ("net", (INPUTS + TARGET).replace("inputs.x", "inputs.z"), "z"),
        ("net", (INPUTS + TARGET).replace("[6]", "[5]"), ":Net.forward failed"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_the_reason(
    own: str, factory: str, job: str, reason: str
) -> None:
    with pytest.raises(PipeplanError) as raised:
        trace(f"{own}:{factory}", job_from(job))
    assert reason in str(raised.value)


def test_unknown_factories_are_answered_with_the_known_ones(own: str) -> None:
    with pytest.raises(PipeplanError, match=r"it has .*described, fickle, own_loss, no_module"):
        trace(f"{own}:nett", Job())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("models.no_such:factory", "no module 'models.no_such'"),
        ("no_such_package.deep:factory", "no module 'no_such_package'"),
        ("models.gpt", "expected module:factory"),
        (":factory", "expected module:factory"),
        ("models.gpt:", "expected module:factory"),
        ("models.gpt:gpt_huge", "it has"),
    ],
)
def test_a_name_that_finds_no_factory_is_refused(name: str, reason: str) -> None:
    with pytest.raises(PipeplanError) as raised:
        trace(name, Job())
    assert reason in str(raised.value)
