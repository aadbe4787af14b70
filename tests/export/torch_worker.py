"""A rank that runs exported schedules in torch's own pipeline runtime, and compares gradients.

``torchrun torch_worker.py FOLDER``: each folder in it has a schedule.csv and a stages.json. Stages
of tensor-parallel groups are split by torch's own ``parallelize_module``.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from folders import check_each
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 6
SAMPLES = 2


class Block(nn.Module):
    """Two products beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def module_of(name: str) -> nn.Module:
    """Weights that depend on the layer's name alone."""
    torch.manual_seed(sum(map(ord, name)))
    return Block()


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


def shared(module: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    """The first product of each block split by columns, the second by rows, if there is a mesh."""
    if mesh is not None:
        for block in module:
            parallelize_module(
                block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
            )
    return module


def stage_of(
    row: dict, count: int, group: dist.ProcessGroup, mesh: DeviceMesh | None
) -> PipelineStage:
    """With shapes told, so that torch runs no forward to find them."""
    first, last = row["stage"] == 0, row["stage"] == count - 1
    sample = torch.zeros(SAMPLES, WIDTH)
    return PipelineStage(
        shared(stage_module(row["layers"]), mesh),
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
    degree, ranks = table.get("tensor_parallel", 1), len(table["ranks"])
    mesh = None
    if degree == 1:
        group = dist.new_group(list(range(ranks)))
        if rank >= ranks:
            return
    else:
        both = init_device_mesh("cpu", (ranks // degree, degree), mesh_dim_names=("pp", "tp"))
        group, mesh = both.get_group("pp"), both["tp"]
    rows = [row for row in table["stages"] if rank in row["ranks"]]
    stages = [stage_of(row, len(table["stages"]), group, mesh) for row in rows]
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
            grad = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    check_each(check, "schedules")
