"""Gradients of 16-bit weights, summed in float32: against the exact sum of the same gradients."""

from __future__ import annotations

import pytest
import torch
from executor_plans import by_counts, shuffled, zoo_pipeline
from plain_torch import Alone, Named
from run_files import RunFiles

from planner.plan.plan import Plan

pytestmark = [pytest.mark.extensive, pytest.mark.usefixtures("shared_exports")]
RANKS, MICROBATCHES = 4, 64


class Exact(Alone):
    """One process that sums the 16-bit gradients of microbatches in float64."""

    def step(self, step: int) -> float:
        self.sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.named()}
        return super().step(step)

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.model.named_parameters())

    def _microbatch(self, step: int, number: int) -> float:
        loss = super()._microbatch(step, number)
        for name, parameter in self.named():
            self.sums[name] += parameter.grad.double()
            parameter.grad = None
        if number == self.plan.microbatches - 1:
            for name, parameter in self.named():
                parameter.grad_dtype = None
                parameter.grad = self.sums[name].float()
        return loss


def plan_of(*, ends: str = "d3 d0", split: float = 0.5, **job: object) -> Plan:
    """Tied embedding and head on two ranks, replicas between, whole and split backwards."""
    fields = {"learning_rate": 1.0, "precision": "bfloat16", **job}
    pipeline = zoo_pipeline("gpt_tiny", [3, 6], ["d0", "d1 d2", ends], MICROBATCHES, **fields)
    halves = {"d1": MICROBATCHES // 4, "d2": 3 * MICROBATCHES // 4}
    owners = {**by_counts(1, halves), **by_counts(2, {ends.split()[0]: MICROBATCHES})}
    whole = {(0, m): "d0" for m in range(MICROBATCHES)}
    return shuffled(pipeline, 1, {**whole, **owners}, split=split)


PLANS = {
    "replicas": lambda: plan_of(),
    "weights": lambda: plan_of(gradient_precision="weights"),
    "shared": lambda: plan_of(shard_optimizer=True),
}
SYNCS = {
    "overlapped": ("replicas", "all_reduce:bucket_mib=0.05"),
    "fused": ("replicas", "fused"),
    "decoupled": ("replicas", "decoupled"),
    "cross": ("replicas", "cross_iteration"),
    "zero1": ("shared", "all_reduce:bucket_mib=0.05"),
    "weights": ("weights", "all_reduce:bucket_mib=0.05"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    found = RunFiles(tmp_path_factory.mktemp("runs"), 1)
    plans = {name: make() for name, make in PLANS.items()}
    for name, (plan, sync) in SYNCS.items():
        found.add(name, plans[plan], sync=sync)
    found.launch(RANKS)
    return found


def masters(runs: RunFiles, name: str) -> Named:
    return runs._read(name, "master/")


def errors(runs: RunFiles, name: str) -> Named:
    """The error of each step of a master against the exact one, over the norm of that."""
    alone = Exact(Plan.load(runs.folder / f"{name}.json"), runs.config(name))
    before = {key: x.detach().clone() for key, x in alone.masters.items()}
    alone.train(1)
    exact = {key: x.detach() - before[key] for key, x in alone.masters.items()}
    found = runs._read(name, "master/")
    assert set(found) == set(exact)
    return {key: (found[key] - before[key] - x).norm() / x.norm() for key, x in exact.items()}


@pytest.mark.parametrize("name", [name for name in SYNCS if name != "weights"])
def test_many_microbatches_train_as_their_exact_sum(runs: RunFiles, name: str) -> None:
    """One process adds the two uses of a tied weight in 16 bits first; ranks do not."""
    found = errors(runs, name)
    assert found.pop("wte.weight") < 2e-3
    assert max(found.values()) < 1e-6


def test_sums_in_the_type_of_the_weights_lose_digits(runs: RunFiles) -> None:
    assert 3e-3 < max(errors(runs, "weights").values()) < 3e-2
