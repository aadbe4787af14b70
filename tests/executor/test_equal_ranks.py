"""Ranks agree on initial values and batches, or stop; what is not finite ends every training."""

from __future__ import annotations

from collections.abc import Mapping

import drawing
import pytest
import torch
from executor_plans import cut_pipeline, scheduled
from plain_torch import Alone, worst_error
from run_files import RunFiles

from executor.training.agreement import CheckedBatches, require_same_batches
from executor.training.samples import DatasetBatches
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.trace import trace

pytestmark = pytest.mark.extensive
STEPS = 4


def plan_of(model: str, devices: str, loss: str = "cross_entropy", **arguments: object) -> Plan:
    """Cut in the middle for ``d0, d1``, two replicas of all for ``d0 d1``."""
    fields = {"precision": "float64", "loss": loss, "model_arguments": arguments}
    graph = trace(f"drawing:{model}", Job(samples_per_microbatch=1, **fields))
    words = devices.split(", ")
    cuts = [len(graph.layers) // 2] if len(words) > 1 else []
    rows = cut_pipeline(graph, f"drawing:{model}", cuts, words, microbatches=4, **fields)
    return scheduled(rows)


DRAWN = {
    "replicas": ("d0 d1", {}),
    "tied": ("d0, d1", {"tied": True}),
    "buffer": ("d0 d1", {"drawn": "buffer"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    files = RunFiles(tmp_path_factory.mktemp("agreement"), STEPS)
    for name, (devices, arguments) in DRAWN.items():
        files.add(name, plan_of("Words", devices, **arguments), model="drawing:Words")
    words = plan_of("Words", "d0, d1", drawn="nothing")
    files.add("by_index", words, data="drawing:by_index", model="drawing:Words")
    numbers = plan_of("Numbers", "d0, d1", "mse")
    text = "skip_non_finite = true\n"
    files.add("skips", numbers, text, data="drawing:Holed", model="drawing:Numbers")
    files.add("own_generator", words, "", 1, data="drawing:own_generator", model="drawing:Words")
    for name, (text, run) in ENDED.items():
        files.add(name, numbers, text, 1, model="drawing:Numbers", **run)
    files.launch(2)
    return files


ENDED = {
    "diverges": ("learning_rate = 1e200", {}),
    "diverges_clipped": ("learning_rate = 1e200\nclip_norm = 1.0", {}),
    "holed": ("", {"data": "drawing:Holed"}),
}
"""Trainings that end on all ranks alike."""


def ended(runs: RunFiles, name: str) -> tuple[str, list[str]]:
    """Return by what a training was ended, and the checkpoints that it left."""
    with pytest.raises(AssertionError) as told:
        runs.history(name)
    return str(told.value), sorted(p.name for p in runs.checkpoints(name).glob("step-*"))


@pytest.mark.parametrize("name", DRAWN)
def test_values_drawn_otherwise_on_each_rank_train_as_those_of_the_first(
    runs: RunFiles, name: str
) -> None:
    devices, arguments = DRAWN[name]
    alone = Alone(plan_of("Words", devices, **arguments), runs.config(name))
    assert runs.losses(name) == pytest.approx(alone.train(STEPS), rel=1e-9)
    assert worst_error(runs.parameters(name), alone.parameters()) < 1e-9


def test_a_data_set_that_differs_from_rank_to_rank_is_refused_in_the_first_step(
    runs: RunFiles,
) -> None:
    told, kept = ended(runs, "own_generator")
    assert "data: step 1, microbatch 0: ranks 0, 1 read other batches" in told
    assert kept == []
    assert len(runs.history("by_index")) == STEPS


@pytest.mark.parametrize("name", ["diverges", "diverges_clipped"])
def test_what_diverges_ends_alike_with_and_without_clipping(runs: RunFiles, name: str) -> None:
    told, kept = ended(runs, name)
    assert "step 2: the loss is inf" in told
    assert kept == ["step-00000001"]


def test_a_step_that_is_not_finite_ends_the_training_or_is_left_out(runs: RunFiles) -> None:
    alone = Alone(plan_of("Numbers", "d0, d1", "mse"), runs.config("skips"))
    example = alone.model.example_batch(1)
    example = {name: x.double() for name, x in example.items()}
    rows = DatasetBatches(drawing.Holed(), example, 4, alone.config.seed)
    alone.batch_of = rows
    wrong = [
        step
        for step in range(1, STEPS + 1)
        if any(rows(step, number)["target"].isnan().any() for number in range(4))
    ]
    assert wrong
    for step in range(1, STEPS + 1):
        if step not in wrong:
            alone.step(step)
    assert worst_error(runs.parameters("skips"), alone.parameters()) < 1e-9
    assert [m["step"] for m in runs.history("skips") if m["skipped"]] == wrong
    told, kept = ended(runs, "holed")
    assert f"step {wrong[0]}: the loss is nan" in told
    assert kept == [f"step-{step:08d}" for step in range(1, wrong[0])]


def changing(step: int, microbatch: int) -> Mapping[str, torch.Tensor]:
    changing.calls += 1
    return {"x": torch.tensor([changing.calls if step == 2 else step])}


changing.calls = 0


def test_two_stages_of_one_rank_that_read_other_batches_are_refused() -> None:
    digests = CheckedBatches(changing, (), 1, first_step=1)
    for step in (1, 2):
        for _ in range(2):
            digests(step, 0)
    require_same_batches(1, [[row, -1.0] for row in digests.take(1)])
    with pytest.raises(PipeplanError, match="step 2, microbatch 0: the stages of rank 0 read"):
        require_same_batches(2, [[row, -1.0] for row in digests.take(2)])
    assert digests.take(9) == []
