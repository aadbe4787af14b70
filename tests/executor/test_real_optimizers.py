"""Optimizers of public packages train on two stages and resume as one process, or are refused."""

from __future__ import annotations

import importlib

import pytest
import torch
from executor_plans import cut_pipeline, scheduled
from peers import PEERS, import_from_peers
from plain_torch import Alone, worst_error
from run_files import RunFiles

from planner.job import Job
from planner.plan.plan import Plan
from planner.tracing.trace import trace

pytestmark = pytest.mark.extensive
STEPS = 4
TRAINED = {
    "lion_pytorch:Lion": 1e-3,
    "schedulefree:AdamWScheduleFree": 1e-2,
    "pytorch_optimizer:Shampoo": 1e-2,
    "pytorch_optimizer:Adan": 1e-3,
    "pytorch_optimizer:Lamb": 1e-3,
    "bitsandbytes.optim:AdamW8bit": 1e-3,
}
"""Learning rates."""
ALL = "(Prodigy|DAdaptAdam): its step on a parameter depends on all parameters"
KEPT = "a checkpoint holds optimizers whose state is plain tensors and numbers"
REFUSED = {
    "prodigyopt:Prodigy": (1.0, ALL),
    "pytorch_optimizer:DAdaptAdam": (1.0, ALL),
    "pytorch_optimizer:SOAP": (1e-3, f"SOAP keeps .* as GG of wpe.weight; {KEPT}"),
    "torchao.optim:AdamW8bit": (1e-3, f"AdamW8bit keeps OptimState8bit.*; {KEPT}"),
}
"""Learning rates, and the error before the first step of a training with checkpoints."""


def plan_in(precision: str) -> Plan:
    """Return a plan of two stages; in float64 rounding does not change the sign of a gradient."""
    graph = trace("models.gpt:gpt_tiny", Job(samples_per_microbatch=1, precision=precision))
    fields = {"microbatches": 2, "precision": precision}
    return scheduled(cut_pipeline(graph, "models.gpt:gpt_tiny", [3], ["d0", "d1"], **fields))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    files = RunFiles(tmp_path_factory.mktemp("optimizers"), STEPS)
    whole, low = plan_in("float64"), plan_in("float32")
    rates = {**TRAINED, **{name: rate for name, (rate, _) in REFUSED.items()}}
    for optimizer, rate in rates.items():
        if (PEERS / optimizer.split(":")[0].split(".")[0]).is_dir():
            text = f'optimizer = "{optimizer}"\nlearning_rate = {rate}\n'
            plan, half = low if "8bit" in optimizer else whole, files.checkpoints(optimizer)
            files.add(optimizer, plan, text, every=2)
            files.add(f"{optimizer}_resumed", plan, text, resume=str(half / "step-00000002"))
    files.launch(2, PEERS)
    return files


@pytest.mark.parametrize("optimizer", TRAINED)
def test_two_stages_train_what_one_process_trains_and_resume_bit_by_bit(
    runs: RunFiles, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    module, _, kind = optimizer.partition(":")
    import_from_peers(monkeypatch, module.split(".")[0])
    make = getattr(importlib.import_module(module), kind)

    def started(parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        made = make(list(parameters.values()), lr=TRAINED[optimizer])
        getattr(made, "train", lambda: None)()
        return made

    plan, config = Plan.load(runs.folder / f"{optimizer}.json"), runs.config(optimizer)
    alone = Alone(plan, config, optimizer=started)
    assert runs.losses(optimizer) == pytest.approx(alone.train(STEPS), rel=1e-5)
    # A sum in another order may round to another one of 256 codes.
    within = 1e-3 if "8bit" in optimizer else 1e-7
    found, resumed = runs.parameters(optimizer), runs.parameters(f"{optimizer}_resumed")
    assert worst_error(found, alone.parameters()) < within
    assert all(x.equal(found[name]) for name, x in resumed.items())


@pytest.mark.parametrize("optimizer", REFUSED)
def test_it_is_refused_by_name_before_the_first_step(
    runs: RunFiles, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    import_from_peers(monkeypatch, optimizer.split(":")[0].split(".")[0])
    with pytest.raises(AssertionError, match=REFUSED[optimizer][1]):
        runs.history(optimizer)
