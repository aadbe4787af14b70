"""Models of one's own, by hand: their layers, boundaries and figures."""

import networkx as nx
import torch
from classifiers import Classifier, mlp, smooth_mlp
from torch import Tensor, nn

from executor.launch.model import structure_differences
from planner.job import Job
from planner.tracing.export import export_step
from planner.tracing.layers import assign_layers
from planner.tracing.measure import measure
from planner.tracing.trace import graph_record, trace


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
    first, relu, last, loss = graph.record.layers
    target = Classifier().example_batch(5)["target"]
    copied = [4 * 5 * 8, 0, 0, target.numel() * target.element_size()]
    assert [row.batch_bytes for row in (first, relu, last, loss)] == copied
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
    record = graph_record(step, layers, measure(step, layers, batch), Job(), "mlp")
    assert structure_differences(record, *exported(16)[:2]) == []
    problems = structure_differences(record, *exported(32)[:2])
    assert "parameter 'layers.0.weight' has 256 elements, the plan says 128" in problems
