"""Models of examples/: frozen parts and several heads train in stages as the whole does."""

from collections.abc import Callable

import pytest
import torch
from in_turn import assert_same, cut_everywhere, run_stages, run_whole, used_by_many
from torch import Tensor, nn
from traces import trace_once

from examples.models.several_heads import SeveralHeads
from examples.models.vision_language import Block, VisionLanguage
from executor.stage.runner import StageRunner
from planner.job import Job
from planner.tracing.factory import example_batch
from planner.tracing.trace import trace

pytestmark = pytest.mark.usefixtures("shared_exports")
WORDS = Job(samples_per_microbatch=2)
OWN_LOSS = Job(samples_per_microbatch=2, loss="output")


class Teacher(nn.Module):
    """A trained model reads, and is compared with, what a layer under no_grad makes.

    The layers of the teacher would take gradients elsewhere: nothing but no_grad keeps them out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(Block(32, 2, False) for _ in range(2))
        self.student = nn.ModuleList(Block(32, 2, False) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the distance of both."""
        rows = self.student[0](rows)
        with torch.no_grad():
            aim = rows + 1
            for block in self.teacher:
                aim = block(aim)
        return (self.student[1](rows + aim) - aim).square().mean()

    def example_batch(self, samples: int) -> dict[str, Tensor]:
        return {"rows": torch.randn(samples, 4, 32)}


def frozen_encoder() -> nn.Module:
    return VisionLanguage(image_layers=2, layers=2)


def frozen_encoder_and_decoder() -> nn.Module:
    """Only what joins them is trained: gradients pass the decoder and stop."""
    return VisionLanguage(image_layers=1, layers=2, frozen=["encoder", "decoder", "head"])


def several_heads() -> nn.Module:
    return SeveralHeads(layers=2, heads=3)


CASES = [
    pytest.param(frozen_encoder, WORDS, marks=pytest.mark.extensive),
    (frozen_encoder_and_decoder, WORDS),
    pytest.param(several_heads, OWN_LOSS, marks=pytest.mark.extensive),
    (Teacher, OWN_LOSS),
]


@pytest.mark.parametrize(("factory", "job"), CASES)
def test_stages_in_turn_are_the_model(factory: Callable[[], nn.Module], job: Job) -> None:
    model, cut, layers = cut_everywhere(factory, job)
    graph = trace_once(factory, job)
    torch.manual_seed(2)
    batch = example_batch(model, job)
    expected = run_whole(model, batch, job.loss)
    rounded = used_by_many(graph)
    middle = len(layers) // 2
    for stages in [[layers[:middle], layers[middle:]], [[layer] for layer in layers]]:
        assert_same(run_stages(model, cut(stages), batch), expected, rounded)
    found = run_stages(model, cut([[layer] for layer in layers]), batch, split=[0])
    assert_same(found, expected, {row.name for row in graph.record.parameters})


def test_a_frozen_stage_keeps_nothing_and_sends_nothing_back() -> None:
    model, cut, layers = cut_everywhere(frozen_encoder, WORDS)
    graph = trace_once(frozen_encoder, WORDS)
    place = layers.index("project.0")
    encoder, rest = cut([layers[:place], layers[place:]])
    torch.manual_seed(2)
    batch = example_batch(model, WORDS)
    runner = StageRunner(encoder, microbatches=1)
    (sent,) = runner.forward(0, (), batch)
    assert not sent.requires_grad
    assert encoder.gradients_in == ()
    assert [t.requires_grad for t in rest.receives] == [False]
    assert runner.backward(0, ()) == ()
    assert all(model.get_parameter(name).grad is None for name in encoder.parameters)
    for name in layers[:place]:
        layer = graph.layers[name]
        assert (layer.stash_bytes, layer.input_gradient_flops, layer.weight_gradient_flops) == (
            (0, 0, 0)
        )
        assert not any(work.phase != "forward" for work in layer.work)


def test_no_grad_costs_what_freezing_does() -> None:
    class NoGrad(VisionLanguage):
        def __init__(self) -> None:
            super().__init__(frozen=[])

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            given = self.encoder.forward

            def encoder(image: Tensor) -> Tensor:
                with torch.no_grad():
                    return given(image)

            self.encoder.forward = encoder
            try:
                return super().forward(image, text)
            finally:
                self.encoder.forward = given

    frozen, without = trace(VisionLanguage, WORDS).record, trace(NoGrad, WORDS).record
    assert without.layers == frozen.layers
    assert without.parameters == frozen.parameters
    assert [t.model_copy(update={"name": ""}) for t in without.boundaries] == [
        t.model_copy(update={"name": ""}) for t in frozen.boundaries
    ]


def test_a_teacher_under_no_grad_is_not_trained() -> None:
    graph = trace_once(Teacher, OWN_LOSS)
    trained = {row.name.split(".")[0] for row in graph.record.parameters if row.trainable}
    assert trained == {"student"}
    assert [name for name in graph.layers if name.startswith("teacher")] == [
        "teacher.0",
        "teacher.1",
    ]
    assert all(graph.layers[f"teacher.{k}"].stash_bytes == 0 for k in range(2))
