"""A rank that trains a chain of blocks by exported arguments in megatron-core's own schedules.

``torchrun megatron_worker.py FOLDER``: each folder in it has a ``megatron.sh``, as ``pipeplan
export`` wrote it, and ``blocks.json``, the blocks that the plan has on each rank.
"""

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_peer
import torch
import torch.distributed as dist
from folders import check_each
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

WIDTH = 8

zeros = torch.zeros
torch.zeros = lambda *sizes, **fields: zeros(
    *sizes,
    **{**fields, "device": "cpu" if fields.get("device") == "cuda" else fields.get("device")},
)
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None


def block(number: int) -> nn.Module:
    """Weights that depend on the block's number alone."""
    torch.manual_seed(number)
    return nn.Linear(WIDTH, WIDTH)


class Chunk(nn.Module):
    """The blocks of a stage."""

    def __init__(self, config: Any, numbers: range) -> None:
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.blocks = nn.ModuleDict({str(number): block(number) for number in numbers})
        self.given: Tensor | None = None

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, inputs: Tensor) -> Tensor:
        value = inputs.requires_grad_() if self.given is None else self.given
        for one in self.blocks.values():
            value = value + torch.tanh(one(value))
        return value


def step(data: Iterator[tuple[Tensor, Tensor]], model: Chunk) -> tuple[Tensor, Any]:
    x, y = next(data)

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        found = nn.functional.mse_loss(output, y)
        return found, {"loss": found.detach()}

    return model(x), loss


def check(folder: Path) -> None:
    script = (
        f'source {shlex.quote(str(folder / "megatron.sh"))}; printf "%s\\n" "${{PIPEPLAN_ARGS[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    args = megatron_peer.parsed(shlex.join(done.stdout.splitlines()))
    counts, config = megatron_peer.stages_of(args)
    size, chunks = args.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=size, virtual_pipeline_model_parallel_size=chunks
    )
    # As Megatron-LM sets both: messages overlap where stages are interleaved.
    config.overlap_p2p_comm, config.batch_p2p_comm = chunks is not None, chunks is None
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model = []
    for chunk in range(chunks or 1):
        offset = get_transformer_layer_offset(config, vp_stage=chunk if chunks else None)
        count = counts[rank + size * chunk]
        model.append(Chunk(config, range(offset, offset + count)))
    held = [list(map(int, chunk.blocks)) for chunk in model]
    assert held == json.loads((folder / "blocks.json").read_text())[dist.get_rank()]
    replicas = parallel_state.get_data_parallel_world_size()
    share = args.global_batch_size // args.micro_batch_size // replicas
    torch.manual_seed(0)
    batches = [tuple(torch.randn(2, 1, 1, WIDTH).unbind()) for _ in range(share * replicas)]
    mine = batches[parallel_state.get_data_parallel_rank() :: replicas]
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(mine) for _ in model] if chunks else iter(mine),
        model=model if chunks else model[0],
        num_microbatches=share,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    alone = [block(number) for number in range(args.num_layers)]
    for x, y in batches:
        value = x
        for one in alone:
            value = value + torch.tanh(one(value))
        (nn.functional.mse_loss(value, y) / len(batches)).backward()
    for chunk in model:
        for name, one in chunk.blocks.items():
            grad = one.weight.grad
            dist.all_reduce(grad, group=parallel_state.get_data_parallel_group())
            torch.testing.assert_close(grad / replicas, alone[int(name)].weight.grad)


if __name__ == "__main__":
    assert schedules.torch.zeros is torch.zeros
    check_each(check, "exports")
