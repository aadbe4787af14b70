"""A rank that trains torchtitan's Llama by exported plans, and compares gradients.

``torchrun titan_worker.py FOLDER``: each folder in it is one that ``pipeplan export`` wrote.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from folders import check_each
from titan_model import build
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3 import parallelize_llama

parallel_dims.device_type = "cpu"  # Without an accelerator torchtitan takes it for "cuda".
LENGTH = 16
VOCABULARY = 2048


def initialised() -> nn.Module:
    model = build()
    model.init_states(buffer_device=torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.05)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(folder: Path) -> None:
    keys = json.loads((folder / "torchtitan.json").read_text())
    keys["parallelism"]["pipeline_parallel_schedule_csv"] = str(folder / "schedule.csv")
    # The default backend shards by the trainer's own configuration of the model.
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    parallelism = replace(parallelism, **keys["parallelism"])
    training = replace(TrainingConfig(), seq_len=LENGTH, **keys["training"])
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    samples = training.global_batch_size
    count = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size

    def loss_of(output: Tensor, target: Tensor) -> tuple[Tensor, None]:
        flat = output.flatten(0, 1).float(), target.flatten(0, 1)
        return nn.functional.cross_entropy(*flat, reduction="sum") / (samples * LENGTH), None

    model = initialised()
    schedule, parts, first, last = pipeline_llm(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=model.config,
        parallelize_fn=parallelize_llama,
        loss_fn=loss_of,
    )
    assert schedule._n_microbatches == count
    torch.manual_seed(1)
    tokens, target = torch.randint(VOCABULARY, (2, samples, LENGTH))
    pipelines = parallelism.data_parallel_replicate_degree
    mine = dist.get_rank() % pipelines
    x, y = tokens.chunk(pipelines)[mine], target.chunk(pipelines)[mine]
    schedule.step(*([x] if first else []), **({"target": y} if last else {}))
    alone = initialised()
    loss_of(alone(tokens), target)[0].backward()
    expected = dict(alone.named_parameters())
    # Losses are summed: torchtitan lets FSDP sum gradients over pipelines, not average them.
    for part in parts:
        for name, parameter in part.named_parameters():
            found, wanted = whole(parameter.grad), expected[name].grad
            error = float((found - wanted).norm() / wanted.norm())
            assert error < 1e-5, f"{folder.name}: gradient of {name} off by {error:.1e}"


if __name__ == "__main__":
    check_each(check, "exports")
