"""``python -m executor.profiling``: which layers are alike, what is measured, kept and refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from warm_python import warm_python

from executor.profiling.__main__ import main
from executor.profiling.kinds import alike
from executor.profiling.measure import CacheSweep, Patience, measured
from executor.profiling.profile import ProfileRequest, is_unsteady, profile
from executor.profiling.sizes import SizedModel, sized_models
from planner.job import Job
from planner.model.length_graph import record_at
from planner.model.measured_costs import Costs, SizedCosts, Timing
from planner.tracing.trace import trace

CPU = torch.device("cpu")
QUICK = Patience(0.0, least=2)
GPT = "models.gpt:gpt_tiny"
COMMON = ("--device", "cpu", "--seconds", "0", "--threads", "1", "--samples", "1")


class Blocks(nn.Module):
    """Two layers of each kind, and one that differs in something that is no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.dropped = nn.ModuleList(nn.Dropout(rate) for rate in (0.1, 0.1, 0.2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in (self.frozen, *self.blocks, *self.dropped):
            inputs = layer(inputs)
        return inputs.square().mean()

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"inputs": torch.randn(samples, 8)}


def request(output: Path, **fields: object) -> ProfileRequest:
    given = {
        "model": GPT,
        "job": Job(),
        "sizes": (1, 2),
        "device": CPU,
        "device_type": "CPU-core",
        "patience": QUICK,
        **fields,
    }
    return ProfileRequest(output=output, **given)


def job_of_own_loss(folder: Path) -> Path:
    path = folder / "job.toml"
    path.write_text('format = "pipeplan-job/1"\nloss = "output"\n')
    return path


def sized_model(model: str, job: Job, samples: int) -> SizedModel:
    [found] = sized_models(model, job, samples)
    return found


def kinds_of(model: str, job: Job, *sizes: int) -> list[tuple[str, ...]]:
    return alike([sized_model(model, job, samples).signatures for samples in sizes])


def test_blocks_of_a_transformer_are_alike() -> None:
    kinds = kinds_of(GPT, Job(), 1, 2)
    assert ("h.0", "h.1", "h.2", "h.3") in kinds
    assert sorted(name for kind in kinds for name in kind) == sorted(
        sized_model(GPT, Job(), 1).layers.names
    )


def test_layers_that_differ_in_a_rate_or_in_what_is_trained_are_not_alike() -> None:
    kinds = kinds_of("test_profile:Blocks", Job(loss="output"), 3)
    assert kinds[:4] == [("frozen",), ("blocks.0",), ("blocks.1",), ("dropped.0", "dropped.1")]


@pytest.mark.extensive
def test_every_kind_is_measured_once_at_every_size(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / "costs.json"
    costs = profile(request(path), told.append)
    assert Costs.load(path) == costs
    lines = [line for line in told if not line.startswith("note: ")]  # Of a busy machine.
    assert len(lines) == 2 * len(costs.kinds) + 1
    assert costs.optimizer is not None
    assert lines[-1].startswith(f"step of {costs.optimizer.optimizer}: ")
    for kind in costs.kinds:
        assert [row.samples_per_microbatch for row in kind.sizes] == [1, 2]
        assert all(row.forward.repeats >= QUICK.least for row in kind.sizes)
    assert costs.hardware
    assert costs.made_with["torch"] == torch.__version__


def test_a_job_of_several_lengths_is_measured_at_each(tmp_path: Path) -> None:
    lengths = {"tokens": (8, 64), "shares": (0.5, 0.5)}
    job = Job.model_validate({"lengths": lengths})
    costs = profile(request(tmp_path / "costs.json", job=job, sizes=(1,)), lambda line: None)
    graph = trace(GPT, job)
    for kind in costs.kinds:
        assert [row.size for row in kind.sizes] == [(1, 8), (1, 64)]
        for number, row in enumerate(kind.sizes):
            traced = record_at(graph.record, number)
            [layer] = [layer for layer in traced.layers if layer.name == kind.layers[0]]
            assert row.forward_flops == layer.forward_flops
    [wide] = [kind for kind in costs.kinds if "h.0" in kind.layers]
    # It keeps at least its input's successor for each token.
    assert wide.sizes[1].stash_bytes == pytest.approx(8 * wide.sizes[0].stash_bytes, rel=0.5)


@pytest.mark.parametrize(
    ("backward_ms", "spread", "expected"),
    [
        (8, 0, False),
        (8, 0.9, False),
        (8, 1.1, True),
        (11, 0, False),
        (13, 0, True),
        (0.9, 2, False),
    ],
)
def test_spread_times_and_backwards_far_above_their_halves_are_measured_again(
    backward_ms: float, spread: float, expected: bool
) -> None:
    """The halves take 4 ms each, or next to nothing beside a backward of less than 1 ms."""

    def timing(milliseconds: float, apart: float = 0.0) -> Timing:
        median_s = milliseconds * 1e-3
        low_s, high_s = (median_s * (1 + sign * apart / 2) for sign in (-1, 1))
        return Timing(median_s=median_s, low_s=max(0, low_s), high_s=high_s, repeats=3)

    half = timing(4 if backward_ms > 1 else 0.001)
    row = SizedCosts(
        samples_per_microbatch=1,
        forward_flops=1,
        forward=half,
        backward=timing(backward_ms, spread),
        input_gradient=half,
        weight_gradient=half,
        stash_bytes=0,
        weight_stash_bytes=0,
        forward_bytes=0,
        backward_bytes=0,
    )
    assert is_unsteady(row) == expected


@pytest.mark.extensive
def test_what_was_measured_before_an_interruption_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"

    def interrupted(line: str) -> None:
        if line.startswith("3/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(request(path), interrupted)
    kept = Costs.load(path)
    assert sum(len(kind.sizes) for kind in kept.kinds) == 3
    told: list[str] = []
    whole = profile(request(path), told.append)
    lines = [line for line in told if not line.startswith("note: ")]
    assert len(lines) == 2 * len(whole.kinds) - 3 + 1
    assert list(kept.kinds[0].sizes) == [whole.kinds[0].sizes[0]]


def test_bytes_of_a_linear_layer_are_those_worked_out_by_hand() -> None:
    samples, width, float_bytes = 64, 512, 4
    model = sized_model("test_profile:Wide", Job(loss="output"), samples)
    found = measured(model, "second", CPU, QUICK)
    # The received input is not counted: the caller holds it. The output is all that is made.
    output = samples * width * float_bytes
    assert found.stash_bytes == 0
    assert found.forward_bytes == output
    # The gradient of the input, and that of the weights before it is added to those before.
    assert found.backward_bytes >= output + width * width * float_bytes
    assert found.backward_bytes <= output + width * width * float_bytes + 4 * width * float_bytes


class Wide(nn.Module):
    """A wide layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512, bias=False)
        self.second = nn.Linear(512, 512, bias=False)
        self.third = nn.Linear(512, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(self.second(self.first(inputs))).sum()

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"inputs": torch.randn(samples, 512)}


class Table(nn.Embedding):
    """Takes only what no made-up input is."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs - 7)


class Unruly(nn.Module):
    """Indexes by what the layer before makes: alone, it gets other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 8)
        self.table = Table(4, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.table(self.scores(inputs).argmax(-1)).mean()

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"inputs": torch.randn(samples, 8)}


@pytest.mark.parametrize("twice", [False, True])
def test_what_a_twin_holds_is_no_part_of_a_layer(
    *, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has weights of its own, or these fill the caches by themselves."""
    monkeypatch.setattr("executor.profiling.measure._cache_bytes", lambda _: 64 if twice else 2**20)
    model = sized_model(GPT, Job(), 1)
    sweep = CacheSweep(CPU, model_bytes=2**30)
    assert sweep.bytes
    for layer in model.layers.names:
        plain, swept = (measured(model, layer, CPU, QUICK, how) for how in (None, sweep))
        assert swept.stash_bytes == plain.stash_bytes
        assert swept.forward_bytes == plain.forward_bytes
        assert swept.backward_bytes == plain.backward_bytes


def test_a_layer_that_cannot_run_alone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text('format = "pipeplan-job/1"\nloss = "output"\n')
    words = ["test_profile:Unruly", "--job", str(job), "-o", str(tmp_path / "c.json"), *COMMON]
    assert main(words) == 1
    assert "error: layer 'table' cannot be run alone at 1 sample:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([GPT, "--samples", "1,x"], "--samples: '1,x'"),
        ([GPT, "--samples", "0"], "--samples: '0'"),
        ([GPT, "--device", "cpu", "--threads", "0"], "--threads: 0"),
        ([GPT, "--seconds", "nan"], "--seconds: nan"),
        ([GPT, "--set", "layers"], "--set layers: expected NAME=VALUE"),
        (["models.gpt:no_such"], "'models.gpt' has no callable 'no_such'"),
        ([GPT, "-o", "/no/such/folder/costs.json"], "there is no folder /no/such/folder"),
    ],
)
def test_wrong_options_are_named(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert told in capsys.readouterr().err


def test_what_was_written_is_one_json_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    words = ["test_profile:Blocks", "--job", str(job_of_own_loss(tmp_path)), "-o", str(path)]
    assert main([*words, *COMMON, "--json"]) == 0
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["written"] == [str(path)]
    assert document["kinds"] == len(Costs.load(path).kinds)
    assert "1/" in told.err


def test_threads_are_of_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --device a GPU is measured if there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert main([GPT, "--threads", "1"]) == 1
    assert "--threads: 1; they are of a CPU, and a GPU would be measured" in capsys.readouterr().err


@pytest.mark.extensive
def test_costs_of_something_else_are_not_added_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    assert main([GPT, "-o", str(path), *COMMON]) == 0
    before = path.read_text()
    assert main([GPT, "--set", "width=96", "-o", str(path), *COMMON]) == 1
    error = capsys.readouterr().err
    assert "holds other costs, which cannot be added to (kinds: layer" in error
    assert path.read_text() == before


@pytest.mark.extensive
def test_a_plan_is_made_from_a_profile_by_the_command_line(tmp_path: Path) -> None:
    costs, plan = tmp_path / "costs.json", tmp_path / "plan.json"
    run = [warm_python(), "-m", "planner.cli"]
    subprocess.run([*run, "profile", GPT, "-o", costs, *COMMON], check=True)
    cluster = "examples/clusters/this_machine.toml"
    limit = ["--time-limit", "2", "--costs", costs, "-o", plan]
    subprocess.run([*run, "plan", GPT, "--cluster", cluster, *limit], check=True)
    layers = json.loads(plan.read_text())["model"]["graph"]["layers"]
    measured_s = Costs.load(costs).at("h.2", 1).forward_s
    (block,) = [layer for layer in layers if layer["name"] == "h.2"]
    assert block["measured"]["CPU-core"]["forward_s"] == measured_s


def test_what_is_wrong_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([GPT, "--samples", "0", "--json"]) == 1
    told = capsys.readouterr()
    (problem,) = json.loads(told.out)["error"]
    assert problem.startswith("--samples: '0'")
    assert f"error: {problem}" in told.err
