"""Cutting a model into stages changes nothing: run one after the other, they are the model."""

import weakref
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from executor_plans import DEVICES, TINY, pipeline_of, scheduled, traced
from in_turn import Stages, assert_same, cut_everywhere, run_stages, run_whole, used_by_many
from torch import Tensor, nn
from torch.nn import functional

from executor.launch.model import PlannedModel
from executor.split.model_split import cut
from executor.split.stage_module import StageModule
from executor.stage.runner import StageRunner
from executor.sync.shared_parameters import shared_parameters
from models import ZOO
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.export import ExportedStep
from planner.tracing.factory import example_batch, import_factory
from planner.tracing.layers import LayerAssignment
from planner.tracing.trace import trace

pytestmark = pytest.mark.usefixtures("shared_exports")
Exported = tuple[nn.Module, ExportedStep, LayerAssignment]


def plan_of(name: str, stages: Stages) -> Plan:
    """One microbatch through stages on one device."""
    rows = [(layers, DEVICES[:1]) for layers in stages]
    return scheduled(pipeline_of(traced(name), ZOO[name], rows, microbatches=1))


@cache
def exported_model(name: str) -> Exported:
    torch.manual_seed(1)
    model = import_factory(ZOO[name])().train()
    return model, *PlannedModel(plan_of(name, [list(traced(name).layers)]), model).export()


def cut_into(name: str, stages: Stages) -> list[StageModule]:
    _, exported, layers = exported_model(name)
    return cut(exported, layers, plan_of(name, stages), range(len(stages)))


def every_cut(name: str) -> list[Stages]:
    """In the middle alone, and at all layer boundaries."""
    layers = list(traced(name).layers)
    middle = len(layers) // 2
    return [[layers[:middle], layers[middle:]], [[layer] for layer in layers]]


@dataclass(frozen=True)
class Cuts:
    """A tiny model, cut everywhere: layers of the stages, and these."""

    name: str
    rows: list[tuple[Stages, list[StageModule]]]


@pytest.fixture(scope="module", params=TINY)
def cuts(request: pytest.FixtureRequest) -> Cuts:
    name = request.param
    return Cuts(name, [(stages, cut_into(name, stages)) for stages in every_cut(name)])


@pytest.mark.extensive
def test_stages_in_turn_give_exactly_the_loss_and_gradients_of_the_model(cuts: Cuts) -> None:
    model, _, _ = exported_model(cuts.name)
    torch.manual_seed(2)
    batch = example_batch(model, Job(samples_per_microbatch=2))
    expected = run_whole(model, batch, "cross_entropy")
    for _, modules in cuts.rows:
        found = run_stages(model, modules, batch)
        assert_same(found, expected, used_by_many(traced(cuts.name)))


@pytest.mark.extensive
def test_what_crosses_is_what_the_planner_counted(cuts: Cuts) -> None:
    graph = traced(cuts.name)
    for stages, modules in cuts.rows:
        assert modules[0].receives == ()
        assert modules[-1].sends == ()
        for index in range(len(stages) - 1):
            assert modules[index].sends == modules[index + 1].receives
            done = [layer for stage in stages[: index + 1] for layer in stage]
            assert [
                (t.name, t.shape, str(t.dtype), t.requires_grad) for t in modules[index].sends
            ] == [
                (t.name, t.shape, f"torch.{t.dtype}", t.requires_grad) for t in graph.crossing(done)
            ]


def test_position_tables_are_computed_where_they_are_used() -> None:
    width = 64
    for stage in cut_into("llama_tiny", every_cut("llama_tiny")[-1])[:-2]:
        # The residual stream alone: no cosines and sines, whose last dimension is a half head.
        assert [tensor.shape for tensor in stage.sends] == [(2, 64, width)]


def test_skips_are_handed_on_by_the_stages_between() -> None:
    stages = cut_into("unet_tiny", every_cut("unet_tiny")[-1])
    assert [len(stage.sends) for stage in stages] == [
        2,  # down.0: its skip and the halved image
        3,  # down.1: both skips and the halved image
        3,  # bottom
        2,  # up.0 has used the inner skip
        1,  # up.1 has used the outer one
        1,  # head
        0,  # loss
    ]


@pytest.mark.extensive
def test_stages_hold_the_models_parameters_under_its_own_names(cuts: Cuts) -> None:
    model, _, _ = exported_model(cuts.name)
    expected = dict(model.named_parameters())
    state = model.state_dict()
    for _, modules in cuts.rows:
        held: dict[str, nn.Parameter] = {}
        for stage in modules:
            (piece,) = stage.pieces
            assert dict(piece.graph.named_parameters()).keys() == stage.parameters.keys()
            assert piece.graph.state_dict().keys() <= state.keys()
            for parameter_name, parameter in stage.parameters.items():
                assert parameter is expected[parameter_name]
            held.update(stage.parameters)
        assert held.keys() == expected.keys()


def test_a_tied_parameter_is_in_both_stages_under_one_name() -> None:
    stages = cut_into("gpt_tiny", every_cut("gpt_tiny")[-1])
    holders = [stage.index for stage in stages if "wte.weight" in stage.parameters]
    assert holders == [0, len(stages) - 2]
    assert stages[0].parameters["wte.weight"] is stages[-2].parameters["wte.weight"]


def test_masks_cross_as_bools_and_trained_biases_with_their_gradients() -> None:
    bert = cut_into("bert_tiny", every_cut("bert_tiny")[-1])
    sent = [t for t in bert[0].sends if t.dtype == torch.bool]
    assert [(t.shape, t.requires_grad) for t in sent] == [((2, 1, 1, 32), False)]
    t5 = cut_into("t5_tiny", every_cut("t5_tiny")[-1])
    biases = [t for stage in t5 for t in stage.sends if t.shape == (1, 4, 24, 24)]
    assert biases
    assert all(t.requires_grad for t in biases)


def test_an_output_is_not_held_until_the_backward() -> None:
    model, _, _ = exported_model("gpt_tiny")
    layers = list(traced("gpt_tiny").layers)
    first, _ = cut_into("gpt_tiny", [layers[:5], layers[5:]])
    seen: list[weakref.ref[Tensor]] = []
    runner = StageRunner(first, microbatches=1)
    (run,) = runner._whole_runs
    run.register_forward_hook(lambda module, given, out: seen.append(weakref.ref(out[0])))
    sent = runner.forward(0, (), example_batch(model, Job(samples_per_microbatch=2)))
    assert [reference() for reference in seen] == [None]
    runner.backward(0, [torch.ones_like(tensor) for tensor in sent])
    assert first.parameters["wte.weight"].grad is not None
    model.zero_grad(set_to_none=True)


# --- models of one's own ------------------------------------------------------------------------


class Blocks(nn.Module):
    """Three linear layers on rows of four."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"rows": torch.randn(samples, 4), "target": torch.randn(samples, 4)}


class Masked(Blocks):
    """All layers use one random mask."""

    def mask(self, rows: Tensor) -> Tensor:
        return torch.rand(4, device=rows.device)

    def forward(self, rows: Tensor) -> Tensor:
        mask = self.mask(rows)
        for layer in self.h:
            rows = layer(rows) * mask
        return rows


class MaskedWithAutocastOff(Masked):
    def mask(self, rows: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return super().mask(rows) * 2 + 1


class Slots(Blocks):
    """Writes a value with a gradient into memory that had none."""

    def forward(self, rows: Tensor) -> Tensor:
        slots = rows.new_zeros(rows.shape)
        slots[:, :2] = self.h[0](rows)[:, :2]
        return self.h[2](self.h[1](rows) + slots)


class Ramp(Blocks):
    """Makes tensors in forward without saying on which device."""

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.h:
            rows = layer(rows) * torch.linspace(0, 1, 4) + torch.arange(4) + torch.tensor([2.0])
        return rows


class Detached(Blocks):
    """The loss sees the first layer by its largest element alone, and the second not at all."""

    def forward(self, rows: Tensor) -> Tensor:
        first = self.h[0](rows)
        second = self.h[1](first.detach())
        return self.h[2](rows) + second.detach() + first.argmax(-1, keepdim=True)


OWN = [MaskedWithAutocastOff, Slots, Ramp, Detached]


@pytest.mark.parametrize("factory", OWN)
def test_stages_in_turn_give_exactly_what_plain_torch_does(factory: type[Blocks]) -> None:
    model, cut_model, layers = cut_everywhere(factory)
    batch = model.example_batch(5)
    torch.manual_seed(9)
    expected = run_whole(model, batch, "mse")
    for place in range(1, len(layers)):
        stages = cut_model([layers[:place], layers[place:]])
        assert_same(run_stages(model, stages, batch, seed=9), expected)
    stages = cut_model([[layer] for layer in layers])
    assert_same(run_stages(model, stages, batch, seed=9), expected)


def test_a_parameter_that_the_loss_does_not_reach_is_neither_sent_nor_reduced() -> None:
    graph = trace(Detached, Job(samples_per_microbatch=5, loss="mse"))
    layers = list(graph.layers)
    rows = [([layer], DEVICES[:2]) for layer in layers]
    plan = scheduled(pipeline_of(graph, None, rows, microbatches=2, loss="mse"))
    reduced = [name for row in shared_parameters(plan) for name in row.names]
    assert sorted(reduced) == ["h.2.bias", "h.2.weight"]
    wanted = {t.producer for t in graph.record.boundaries if t.requires_grad}
    assert wanted == {"h.2"}


class Branches(Blocks):
    """Two layers that could run in any order, but for the random numbers they draw."""

    def forward(self, rows: Tensor) -> Tensor:
        first = functional.dropout(self.h[0](rows))
        second = functional.dropout(self.h[1](rows))
        return self.h[2](first + second)


def test_stages_that_would_draw_in_another_order_than_the_model_are_refused() -> None:
    _, cut_model, layers = cut_everywhere(Branches)
    assert layers[:2] == ["h.0", "h.1"]
    assert len(cut_model([[layers[0]], layers[1:]])) == 2
    with pytest.raises(PipeplanError, match=r"'h.0' in stage 1 draws .* before layer 'h.1' in"):
        cut_model([[layers[1]], [layers[0], *layers[2:]]])
