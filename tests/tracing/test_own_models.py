"""Models of one's own: found by name, described by the job, measured like autograd does."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from models import ZOO
from planner.artifacts.job import Job
from planner.errors import PipeplanError
from planner.tracing.export import export_step
from planner.tracing.factory import import_factory
from planner.tracing.layers import assign_layers
from planner.tracing.structure import structure_differences
from planner.tracing.trace import graph_record, trace


class Classifier(nn.Module):
    """A network with a batch of rows to classify."""

    def __init__(self, *layers: nn.Module, inputs: tuple[int, ...] = (8,), classes: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.inputs = inputs
        self.classes = classes

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {
            "rows": torch.randn(samples, *self.inputs),
            "target": torch.randint(self.classes, (samples,)),
        }


def mlp() -> nn.Module:
    return Classifier(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def smooth_mlp() -> nn.Module:
    return Classifier(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def convolutions() -> nn.Module:
    return Classifier(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 2, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8, 4),
        inputs=(3, 7, 7),
    )


def kept_by_autograd(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes of all storages saved on the CPU in one real forward, weights and buffers excluded."""
    weights = [*model.parameters(), *model.buffers()]
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    target = batch.pop("target")
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**batch)
        if output.ndim == 3:
            output, target = output.flatten(0, 1), target.flatten()
        functional.cross_entropy(output, target)
    storages = [tensor.untyped_storage() for tensor in saved.values()]
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in known)


# These two have tests of their own below.
SAVED_OTHERWISE = ("t5_tiny", "gnmt_tiny")
ZOO_FACTORIES = [
    import_factory(ZOO[key]) for key in ZOO if key.endswith("_tiny") and key not in SAVED_OTHERWISE
]


@pytest.mark.parametrize("factory", [mlp, smooth_mlp, convolutions, *ZOO_FACTORIES])
@pytest.mark.parametrize("samples", [2, 5])
def test_the_stash_is_what_autograd_keeps(factory: Callable[[], nn.Module], samples: int) -> None:
    graph = trace(factory, Job(samples_per_microbatch=samples))
    model = factory()
    expected = kept_by_autograd(model, model.example_batch(samples))
    assert sum(layer.stash_bytes for layer in graph.record.layers) == expected


@pytest.mark.parametrize("samples", [2, 5])
def test_attention_with_a_trained_bias_keeps_what_fused_kernels_do(samples: int) -> None:
    """The CPU has no such kernel for a bias with a gradient and keeps the weights instead."""
    factory = import_factory(ZOO["t5_tiny"])
    graph = trace(factory, Job(samples_per_microbatch=samples))
    model = factory()
    config = model.config
    rows = samples * config.heads * config.sequence_length
    with_bias = 2 * config.layers
    weights = 4 * with_bias * rows * config.sequence_length
    log_sums = 4 * with_bias * rows
    biases = 4 * 2 * config.heads * config.sequence_length**2
    expected = kept_by_autograd(model, model.example_batch(samples)) - weights + log_sums + biases
    assert sum(layer.stash_bytes for layer in graph.record.layers) == expected


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("samples", [2, 5])
def test_an_lstm_does_the_products_of_its_gates_and_keeps_them(
    samples: int, bidirectional: bool
) -> None:
    class Recurrent(Classifier):
        def forward(self, rows: Tensor) -> Tensor:
            first, lstm, last = self.layers
            return last(lstm(first(rows))[0][:, -1])

    def factory() -> nn.Module:
        lstm = nn.LSTM(8, 16, batch_first=True, bidirectional=bidirectional)
        last = nn.Linear(32 if bidirectional else 16, 4)
        return Recurrent(nn.Linear(8, 8), lstm, last, inputs=(5, 8))

    graph = trace(factory, Job(samples_per_microbatch=samples))
    assert graph.record.flop_coverage == 1
    lstm = graph.layers["layers.1"]
    products = 2 * samples * 5 * 4 * 16 * (8 + 16) * (2 if bidirectional else 1)
    assert lstm.forward_flops == products
    assert lstm.input_gradient_flops == lstm.weight_gradient_flops == products
    model = factory()
    with torch.backends.mkldnn.flags(enabled=False):  # It keeps a workspace of its own.
        expected = kept_by_autograd(model, model.example_batch(samples))
    # There the direction that runs backwards takes a copy of the input.
    copied = 4 * samples * 5 * 8 if bidirectional else 0
    assert sum(layer.stash_bytes for layer in graph.record.layers) == expected - copied


def test_the_stash_of_gnmt_is_what_autograd_keeps_but_for_a_copy() -> None:
    """On the CPU the product of all steps copies what the layer below hands over step by step."""
    factory = import_factory(ZOO["gnmt_tiny"])
    graph = trace(factory, Job(samples_per_microbatch=5))
    model = factory()
    with torch.backends.mkldnn.flags(enabled=False):
        expected = kept_by_autograd(model, model.example_batch(5))
    config = model.config
    copied = 4 * 5 * config.sequence_length * config.width
    assert sum(layer.stash_bytes for layer in graph.record.layers) == expected - copied


def test_layers_inside_a_wrapper_are_layers() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"embed": nn.Linear(8, 8), "h": smooth_mlp().layers})
            self.head = nn.ModuleDict({"last": nn.Linear(4, 4)})

        def forward(self, rows: Tensor) -> Tensor:
            rows = self.body["embed"](rows) + 1
            for layer in self.body["h"]:
                rows = layer(rows)
            return self.head["last"](rows)

        def example_batch(self, samples: int) -> dict[str, Tensor]:
            return Classifier().example_batch(samples)

    numbered = [f"body.h.{index}" for index in range(4)]
    assert list(trace(Wrapped, Job())) == ["body.embed", *numbered, "head", "loss"]


def test_an_mlp_by_hand() -> None:
    graph = trace(mlp, Job(samples_per_microbatch=5))
    assert list(graph) == ["layers.0", "layers.1", "layers.2", "loss"]
    first, relu, last, _ = graph.record.layers
    assert first.forward_flops == first.weight_gradient_flops == 2 * 5 * 8 * 16
    assert first.input_gradient_flops == 0  # Nobody wants the gradient of the data.
    assert last.forward_flops == last.input_gradient_flops == 2 * 5 * 16 * 4
    assert relu.forward_flops == 0
    assert relu.forward_traffic_bytes == 2 * 4 * 5 * 16
    assert first.forward_traffic_bytes == 4 * (5 * 8 + 16 * 8 + 16 + 5 * 16)
    assert (first.stash_bytes, relu.stash_bytes, last.stash_bytes) == (4 * 5 * 8, 4 * 5 * 16, 0)
    assert [(t.producer, t.users, t.bytes) for t in graph.record.boundaries] == [
        ("layers.0", ("layers.1",), 4 * 5 * 16),
        ("layers.1", ("layers.2",), 4 * 5 * 16),
        ("layers.2", ("loss",), 4 * 5 * 4),
    ]
    assert graph.record.boundaries[1].saved_by == "layers.1"
    assert graph.record.boundaries[2].saved_by is None


def test_frozen_layers_have_no_gradients() -> None:
    def frozen() -> nn.Module:
        model = mlp()
        model.layers[0].requires_grad_(False)
        return model

    graph = trace(frozen, Job())
    first, relu, last, _ = graph.record.layers
    assert first.weight_gradient_flops == first.input_gradient_flops == 0
    assert relu.input_gradient_traffic_bytes == 0
    assert last.weight_gradient_flops > 0
    assert last.input_gradient_flops == 0
    assert {p.name: p.trainable for p in graph.record.parameters} == {
        "layers.0.weight": False,
        "layers.0.bias": False,
        "layers.2.weight": True,
        "layers.2.bias": True,
    }
    assert [tensor.requires_grad for tensor in graph.record.boundaries] == [False, False, True]


def test_a_module_that_runs_twice_is_two_layers_with_the_same_weights() -> None:
    class Recurrent(Classifier):
        def forward(self, rows: Tensor) -> Tensor:
            again, head = self.layers
            return head(again(self.act(again(rows))))

    def recurrent() -> nn.Module:
        model = Recurrent(nn.Linear(8, 8), nn.Linear(8, 4))
        model.act = nn.ReLU()
        return model

    graph = trace(recurrent, Job())
    assert list(graph) == ["layers.0", "act", "layers.0#2", "layers.1", "loss"]
    assert graph.layers["layers.0"].parameters == graph.layers["layers.0#2"].parameters
    assert len(graph.record.parameters) == 4
    assert nx.is_directed_acyclic_graph(graph)


def test_one_module_at_two_places_is_two_layers_with_the_same_weights() -> None:
    def tied() -> nn.Module:
        again = nn.Linear(8, 8)
        return Classifier(again, nn.ReLU(), again, nn.Linear(8, 4))

    graph = trace(tied, Job())
    assert list(graph) == ["layers.0", "layers.1", "layers.2", "layers.3", "loss"]
    assert graph.layers["layers.0"].parameters == graph.layers["layers.2"].parameters
    assert len(graph.record.parameters) == 4


def test_operators_without_a_known_cost_are_named() -> None:
    class Inverse(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(rows)

    graph = trace(lambda: Classifier(Inverse(), nn.Flatten(), inputs=(2, 2)), Job(), name="odd")
    assert graph.name == "odd"
    assert 0 < graph.record.flop_coverage < 1
    assert any("matrix_exp" in name for name in graph.record.uncounted_operators)


def test_another_structure_is_told_apart() -> None:
    def exported(width: int) -> tuple:
        with torch.device("meta"):
            model = Classifier(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
            batch = model.example_batch(1)
        step = export_step(model, batch, Job())
        return step, assign_layers(step), batch

    step, layers, batch = exported(16)
    record = graph_record(step, layers, batch, Job(), "mlp")
    assert structure_differences(record, *exported(16)[:2]) == []
    problems = structure_differences(record, *exported(32)[:2])
    assert "parameter 'layers.0.weight' has 256 elements, the plan says 128" in problems


# --- modules in a folder of one's own -------------------------------------------------------------

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
        ("fickle", "", "data-dependent control flow"),
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
