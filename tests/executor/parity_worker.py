"""One rank of the parity test: runs every plan of a folder and compares with a single process.

``torchrun --nproc-per-node 4 parity_worker.py FOLDER`` reads ``FOLDER/*.json`` and writes
``FOLDER/report/NAME.json``: errors of losses, gradients and parameters against plain torch.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.data import batches
from executor.train import Trainer
from planner.artifacts.plan import Plan
from planner.tracing.factory import TrainingStep, import_factory

STEPS = 3
SEED = 7
Named = dict[str, Tensor]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    for path in sorted(folder.glob("*.json")):
        plan = Plan.load(path)
        found = run_plan(plan)
        if dist.get_rank() == 0:
            report = compare(found, run_alone(plan))
            target = folder / "report" / path.name
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(report, indent=1))
    dist.destroy_process_group()


def batch_source(plan: Plan, model: nn.Module) -> Callable[[int, int], Mapping[str, Tensor]]:
    source = "text" if "gpt" in plan.model.name else "random"
    return batches(source, model, plan.job, SEED)


def run_plan(plan: Plan) -> list[dict]:
    """What every rank has after three steps; filled on rank 0 only."""
    trainer = Trainer(plan, seed=SEED)
    draw = torch.rand(4).tolist()
    batch_of = batch_source(plan, trainer.model)
    loss, _ = trainer.forward_backward(1, batch_of)
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.parameters.items()
        if parameter.grad is not None
    }
    trainer.optimizer.step()
    losses = [trainer.step(step, batch_of).loss for step in range(2, STEPS + 1)]
    mine = {
        "share": loss,
        "losses": losses,
        "gradients": gradients,
        "parameters": {name: p.detach() for name, p in trainer.parameters.items()},
        "draw": draw,
        "model_elements": sum(p.numel() for p in trainer.model.parameters()),
        "held_elements": sum(p.numel() for p in trainer.parameters.values()),
    }
    ranks: list[dict] = [{}] * dist.get_world_size()
    dist.gather_object(mine, ranks if dist.get_rank() == 0 else None)
    return ranks


def run_alone(plan: Plan) -> dict:
    """The same training in plain torch: one process, no stages."""
    torch.manual_seed(SEED)
    assert plan.model.factory is not None
    model = import_factory(plan.model.factory)(**plan.model.arguments).train()
    step = TrainingStep(model, plan.job.loss)
    batch_of = batch_source(plan, model)
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=plan.job.learning_rate),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=plan.job.learning_rate, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=plan.job.learning_rate),
    }[plan.job.optimizer](model.parameters())
    gradients: Named = {}
    losses = []
    for number in range(1, STEPS + 1):
        optimizer.zero_grad()
        total = 0.0
        for microbatch in range(plan.microbatches):
            loss = step(**batch_of(number, microbatch)) / plan.microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
        if number == 1:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
    }


def compare(ranks: list[dict], alone: dict) -> dict:
    losses = [sum(rank["share"] for rank in ranks), *ranks[0]["losses"]]
    return {
        "losses": losses,
        "losses_alone": alone["losses"],
        "losses_agree": all(rank["losses"] == ranks[0]["losses"] for rank in ranks),
        **{
            name: [rank[name] for rank in ranks]
            for name in ("draw", "model_elements", "held_elements")
        },
        **{
            kind: compare_tensors([rank[kind] for rank in ranks], alone[kind])
            for kind in ("gradients", "parameters")
        },
    }


def compare_tensors(ranks: list[Named], alone: Named) -> dict:
    """Relative error of each tensor, the largest over its replicas."""
    copies = {name: [rank[name] for rank in ranks if name in rank] for name in alone}
    return {
        "missing": [name for name, found in copies.items() if not found],
        "unknown": sorted({name for rank in ranks for name in rank} - set(alone)),
        "replicas": {name: len(found) for name, found in copies.items()},
        "unequal_replicas": [
            name for name, found in copies.items() if any(not found[0].equal(x) for x in found)
        ],
        "errors": {
            name: max(float((x - alone[name]).norm() / alone[name].norm()) for x in found)
            for name, found in copies.items()
            if found
        },
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
