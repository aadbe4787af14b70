"""A rank that runs exported schedules in torch's own pipeline runtime, and compares gradients.

``torchrun torch_worker.py FOLDER``: each folder in it has a schedule.csv and a stages.json.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from folders import check_each
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH = 6
SAMPLES = 2


def module_of(name: str) -> nn.Module:
    """Weights that depend on the layer's name alone."""
    torch.manual_seed(sum(map(ord, name)))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def stage_module(layers: list[str]) -> nn.Module:
    return nn.Sequential(*(module_of(name) for name in layers if name != "loss"))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def expected_gradients(table: dict, inputs: Tensor, target: Tensor) -> dict[int, list[Tensor]]:
    """A single process's, by stage: of the mean loss over the microbatches."""
    stages = [stage_module(row["layers"]) for row in table["stages"]]
    count = table["microbatches"]
    for x, y in zip(inputs.chunk(count), target.chunk(count), strict=True):
        for stage in stages:
            x = stage(x)
        (loss_of(x, y) / count).backward()
    return {s: [p.grad for p in stage.parameters()] for s, stage in enumerate(stages)}


def stage_of(row: dict, count: int, group: dist.ProcessGroup) -> PipelineStage:
    """With shapes told, so that torch runs no forward to find them."""
    first, last = row["stage"] == 0, row["stage"] == count - 1
    sample = torch.zeros(SAMPLES, WIDTH)
    return PipelineStage(
        stage_module(row["layers"]),
        row["stage"],
        count,
        torch.device("cpu"),
        input_args=(sample.clone().requires_grad_(not first),),
        output_args=(sample.clone().requires_grad_(),),
        input_grads=None if first else (sample,),
        output_grads=None if last else (sample,),
        group=group,
    )


def check(folder: Path) -> None:
    table = json.loads((folder / "stages.json").read_text())
    rank, count = dist.get_rank(), table["microbatches"]
    group = dist.new_group(list(range(len(table["ranks"]))))
    if rank >= len(table["ranks"]):
        return
    rows = [row for row in table["stages"] if row["ranks"] == [rank]]
    stages = [stage_of(row, len(table["stages"]), group) for row in rows]
    schedule = _PipelineScheduleRuntime(stages, n_microbatches=count, loss_fn=loss_of)
    schedule._load_csv(str(folder / "schedule.csv"), format="compute_only")
    torch.manual_seed(0)
    inputs, target = torch.randn(2, count * SAMPLES, WIDTH)
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)
    schedule.step(*([inputs] if first else []), **({"target": target} if last else {}))
    expected = expected_gradients(table, inputs, target)
    for stage in stages:
        for found, wanted in zip(
            stage.submod.parameters(), expected[stage.stage_index], strict=True
        ):
            torch.testing.assert_close(found.grad, wanted, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    check_each(check, "schedules")
