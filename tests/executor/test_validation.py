"""Validation during training: the loss of one process in evaluation mode, and nothing changes."""

from collections.abc import Callable

import pytest
import torch
from executor_plans import on_groups, pipeline_of, scheduled, shuffled, zoo_pipeline
from plain_torch import Alone
from run_files import RunFiles
from traces import trace_once
from user_code import Padded, Points

from executor.checkpoint import Checkpoint
from executor.launch.config import TrainingConfig
from executor.launch.refusals import require_possible
from executor.launch.run import RunSettings
from executor.training.samples import DatasetBatches
from planner.errors import PipeplanError
from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.factory import example_batch

pytestmark = pytest.mark.extensive
STEPS, RANKS = 4, 3
NOISY = "user_code:Noisy"
TABLE = '[validation]\nevery = 2\ndata = "user_code:{data}"\n'


def noisy(**job: object) -> Plan:
    """Two rounds over a device, replicas between them, recomputation, some backwards split."""
    graph = trace_once(NOISY, Job(samples_per_microbatch=2, loss="mse"))
    layers = list(graph.layers)
    stages = [(layers[:2], ["d0"], layers[:2]), (layers[2:4], ["d1", "d2"]), (layers[4:], ["d0"])]
    pipeline = pipeline_of(graph, NOISY, stages, microbatches=4, loss="mse", **job)
    return shuffled(pipeline, 1, split=0.4)


def text(**job: object) -> Plan:
    cuts, devices = ([4], ["d0", "d1 d2"])
    if "shard_parameters" in job:
        cuts, devices = [], ["d0 d1 d2"]
    return scheduled(zoo_pipeline("gpt_tiny", cuts, devices, 6, **job))


def groups(**job: object) -> Plan:
    """Three members of one group, of one stage after the other."""
    return on_groups("gpt_tiny", [4], ["g0", "g0"], scheduled, 3, microbatches=2, **job)


DIVIDED = {"shard_parameters": True, "equal_pipelines": True, "backward": "whole"}
RUNS: dict[str, tuple[Callable[[], Plan], str, dict[str, str]]] = {
    "noisy": (noisy, "Points", {"model": NOISY}),
    "decoupled": (text, "Padded", {"sync": "decoupled"}),
    "groups": (groups, "Padded", {}),
    "divided": (lambda: text(**DIVIDED), "Padded", {}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("validated"), STEPS)
    for name, (plan, data, run) in RUNS.items():
        mean = "" if data == "Points" else 'loss_mean = "tokens"\n'
        found.add(name, plan(), mean + TABLE.format(data=data), **run)
        found.add(f"{name}_without", plan(), mean, **run)
    found.launch(RANKS)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_training_is_the_same_bit_by_bit_as_without(runs: RunFiles, name: str) -> None:
    saved = [Checkpoint.open(runs.checkpoints(n)) for n in (name, f"{name}_without")]
    found, expected = (checkpoint.read(checkpoint.names()) for checkpoint in saved)
    assert found.keys() == expected.keys()
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


def in_evaluation(alone: Alone, dataset: object, over_tokens: bool) -> float:
    """The mean loss of plain torch over all microbatches that the data set fills."""
    example, count = example_batch(alone.model, alone.plan.job), len(dataset) // 2
    batch_of = DatasetBatches(dataset, example, count, 3, first_step=0, shuffled=False)
    rows = []
    alone.model.eval()
    for number in range(count):
        batch = batch_of(0, number)
        weight = int((batch["target"] != -100).sum()) if over_tokens else 1
        with torch.no_grad():
            rows += [(float(alone.step_of(**batch)) * weight, weight)] if weight else []
    alone.model.train()
    return sum(loss for loss, _ in rows) / sum(weight for _, weight in rows)


def test_the_loss_is_that_of_one_process_in_evaluation_mode(runs: RunFiles) -> None:
    alone = Alone(noisy(), runs.config("noisy"))
    for step, row in enumerate(runs.history("noisy"), start=1):
        alone.step(step)
        expected = None if step % 2 else in_evaluation(alone, Points(), over_tokens=False)
        assert row["validation_loss"] == (expected and pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize("name", [name for name in RUNS if name != "noisy"])
def test_a_mean_over_tokens_is_validated_as_one(runs: RunFiles, name: str) -> None:
    alone = Alone(RUNS[name][0](), runs.config(name))
    alone.model.load_state_dict(runs.parameters(name), strict=False)
    expected = in_evaluation(alone, Padded(), over_tokens=True)
    assert runs.history(name)[-1]["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_where_there_is_no_validation_it_is_refused() -> None:
    config = TrainingConfig.parse({"validation": {"every": 2, "data": "random"}}, "test")
    plan = text()
    for change in ({"strategy": "cross_iteration"}, {"strategy": "semi_decentralized"}):
        other = plan.model_copy(update={"sync": plan.sync.model_copy(update=change)})
        with pytest.raises(PipeplanError, match=r"^validation: sync\.strategy '[a-z_]+' has no"):
            require_possible(other, RunSettings(), config)
