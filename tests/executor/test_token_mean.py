"""A mean over tokens is the cross entropy of one process over the whole batch."""

from collections.abc import Callable

import pytest
import torch
from executor_plans import by_counts, scheduled, shuffled, zoo_pipeline
from plain_torch import worst_error
from run_files import RunFiles
from torch import nn
from user_code import Padded

from executor.launch.config import TrainingConfig
from executor.launch.refusals import require_possible
from executor.launch.run import RunSettings
from executor.training.samples import DatasetBatches
from models import ZOO
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.tracing.factory import example_batch, import_factory

STEPS, RANKS = 4, 3


def uneven(split: float = 0.0, **job: object) -> Plan:
    """The last stage's replicas run one and five of six microbatches."""
    pipeline = zoo_pipeline("gpt_tiny", [3], ["d0", "d1 d2"], 6, **job)
    owners = {(0, m): "d0" for m in range(6)}
    return shuffled(pipeline, 1, {**owners, **by_counts(1, {"d1": 1, "d2": 5})}, split)


def three_in_a_row() -> Plan:
    return scheduled(zoo_pipeline("gpt_tiny", [3, 5], ["d0", "d1", "d2"], 6))


PLANS: dict[str, tuple[Callable[[], Plan], str, float]] = {
    "clipped": (uneven, "clip_norm = 0.3", 1e-6),
    "exact": (lambda: uneven(0.6, precision="float64"), "clip_norm = 0.3", 1e-12),
    "sharded": (lambda: uneven(0.6, shard_optimizer=True), "", 1e-6),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("tokens"), STEPS)
    for name, (plan, text, _) in PLANS.items():
        found.add(name, plan(), f'loss_mean = "tokens"\n{text}', data="user_code:Padded")
    found.launch(RANKS)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_that_of_one_process_over_the_whole_batch(runs: RunFiles, name: str) -> None:
    make, _, tolerance = PLANS[name]
    plan, config = make(), runs.config(name)
    torch.manual_seed(config.seed)
    model = import_factory(ZOO["gpt_tiny"])().to(getattr(torch, plan.job.precision))
    optimizer = torch.optim.SGD(model.parameters(), plan.job.learning_rate, momentum=0.9)
    example = example_batch(model, plan.job)
    batch_of = DatasetBatches(Padded(), example, plan.microbatches, config.seed)
    losses, counts = [], set()
    for step in range(1, STEPS + 1):
        batches = [batch_of(step, number) for number in range(plan.microbatches)]
        counts |= {int((batch["target"] != -100).sum()) for batch in batches}
        ids, target = (torch.cat([batch[key] for batch in batches]) for key in ("ids", "target"))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or torch.inf)
        optimizer.step()
        losses.append(loss.item())
    assert min(counts) == 0
    assert len(counts) > 2
    assert runs.losses(name) == pytest.approx(losses, rel=tolerance)
    found = {n: p.detach() for n, p in model.named_parameters()}
    assert worst_error(runs.parameters(name), found) < tolerance


def test_a_loss_without_targets_is_refused() -> None:
    plan = three_in_a_row()
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"loss": "output"})})
    with pytest.raises(PipeplanError, match=r'loss_mean: "tokens" needs targets, and the model'):
        require_possible(plan, RunSettings(), TrainingConfig(loss_mean="tokens"))
