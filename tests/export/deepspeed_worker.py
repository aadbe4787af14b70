"""A rank that trains a chain by an exported partition in DeepSpeed's engine, on CPU.

``torchrun deepspeed_worker.py FOLDER``: FOLDER is one that ``pipeplan export`` wrote.
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

WIDTH = 6


class Block(nn.Module):
    """Weights that depend on the layer's name alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(sum(map(ord, name)))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.runs = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(self.linear(inputs))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def trained_alone(names: list[str], batches: list, rate: float) -> dict[str, Tensor]:
    model = nn.Sequential(*map(Block, names))
    for x, y in batches:
        (loss_of(model(x), y) / len(batches)).backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    return {f"{name}.weight": block.linear.weight for name, block in zip(names, model, strict=True)}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    import pipeline_module as planned

    deepspeed.init_distributed("gloo")
    config = json.loads((folder / "ds_config.json").read_text())
    model = planned.PlannedPipelineModule(
        [LayerSpec(Block, name) for name in planned.LAYERS], loss_fn=loss_of
    )
    engine, *_ = deepspeed.initialize(model=model, config=config)
    count = config["gradient_accumulation_steps"]
    torch.manual_seed(0)
    pipelines = config["train_batch_size"] // config["train_micro_batch_size_per_gpu"] // count
    batches = list(torch.randn(count * pipelines, 2, 1, WIDTH).unbind())
    batches = [tuple(pair.unbind()) for pair in batches]
    mine = batches[dist.get_rank() % pipelines :: pipelines]
    engine.train_batch(iter(mine))
    expected = trained_alone(planned.LAYERS, batches, config["optimizer"]["params"]["lr"])
    stage = model.stage_id
    held = range(planned.PARTS[stage], planned.PARTS[stage + 1])
    assert len(model.forward_funcs) == len(held)
    for index, block in zip(held, model.forward_funcs, strict=True):
        name = planned.LAYERS[index]
        torch.testing.assert_close(
            block.linear.weight, expected[f"{name}.weight"], rtol=1e-5, atol=1e-7
        )
        again = 2 if index in planned.RECOMPUTE else 1
        assert block.runs == again * count, (name, block.runs)
    dist.barrier()
    if dist.get_rank() == 0:
        print("DeepSpeed agrees with a single process")
    dist.destroy_process_group()
