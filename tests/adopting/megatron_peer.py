"""Stages and orders by megatron-core itself: JSON of questions in, JSON of answers out.

Megatron-LM's own arguments are no part of the package; what ``validate_args`` of its
``megatron/training/arguments.py`` makes of them is written out in :func:`virtual_size`.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

NUMBERS = {
    "pipeline-model-parallel-size": 1,
    "num-layers": None,
    "num-layers-per-virtual-pipeline-stage": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "mtp-num-layers": None,
    "microbatch-group-size-per-virtual-pipeline-stage": None,
    "micro-batch-size": 1,
    "global-batch-size": None,
}
SWITCHES = (
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "no-overlap-p2p-communication",
    "overlap-grad-reduce",
    "untie-embeddings-and-output-weights",
    "use-distributed-optimizer",
)


def parsed(text: str) -> argparse.Namespace:
    """Parse the arguments of stages and batch; Megatron-LM takes no shortened ones."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--pipeline-model-parallel-layout")
    return parser.parse_args(shlex.split(text))


def virtual_size(args: argparse.Namespace) -> int | None:
    size, chunks = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank
    each, layout = args.num_layers_per_virtual_pipeline_stage, args.pipeline_model_parallel_layout
    assert sum(row is not None for row in (chunks, each, layout)) <= 1
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    if layout is not None:
        stages = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        assert stages % size == 0
        chunks = stages // size
    elif each is not None:
        assert first is None
        assert last is None
        of_rank, rest = divmod(args.num_layers + ends, size)
        assert not rest
        assert of_rank % each == 0
        chunks = of_rank // each
    elif chunks is None and first is None and last is None:
        assert (args.num_layers + ends) % size == 0
    if chunks in (None, 1):
        return None
    assert size > (2 if args.no_overlap_p2p_communication else 1)
    return chunks


def stages_of(args: argparse.Namespace) -> tuple[list[int], TransformerConfig]:
    size = args.pipeline_model_parallel_size
    chunks = virtual_size(args)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
        mtp_num_layers=args.mtp_num_layers or None,
        microbatch_group_size_per_vp_stage=args.microbatch_group_size_per_virtual_pipeline_stage
        or size,
    )
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
    found = []
    for chunk in range(chunks or 1):
        for rank in range(size):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            vp_stage = None if chunks is None else chunk
            found.append(get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=rank))
    return found, config


class Group:
    """A process group of one rank, seen from it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Silent:
    """A communicator that sends nothing and receives at once."""

    def __init__(self, config: TransformerConfig, group: Group) -> None:
        self.config, self.pp_group = config, group
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def recv_forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(1)

    recv_backward = recv_forward
    send_forward_recv_backward = recv_forward
    send_backward_recv_forward = recv_forward

    def send_forward(self, *_: Any, **__: Any) -> None:
        pass

    send_backward = send_forward

    def send_forward_recv_forward(self, *_: Any, recv_prev: bool, **__: Any) -> Any:
        return torch.zeros(1) if recv_prev else None

    def send_backward_recv_backward(self, *_: Any, recv_next: bool, **__: Any) -> Any:
        return torch.zeros(1) if recv_next else None

    def send_forward_backward_recv_forward_backward(
        self, *_: Any, recv_prev: bool, recv_next: bool, **__: Any
    ) -> Any:
        return tuple(torch.zeros(1) if wanted else None for wanted in (recv_prev, recv_next))


def order_of(config: TransformerConfig, rank: int, microbatches: int) -> list[str]:
    """Run a rank of megatron-core's own schedule, without computing anything."""
    size, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    order: list[str] = []
    backwards: dict[int, int] = defaultdict(int)

    def forward(*_: Any, current_microbatch: int, vp_stage: int | None = None, **__: Any) -> Any:
        order.append(f"{rank + size * (vp_stage or 0)}F{current_microbatch}")
        output = torch.zeros(1)
        output.stage, output.microbatch = rank + size * (vp_stage or 0), current_microbatch
        return output, torch.zeros([], dtype=torch.int)

    def backward(_: Any, output: Any, *__: Any) -> Any:
        backwards[output.stage] += 1
        order.append(f"{output.stage}B{output.microbatch}")
        return torch.zeros(1)

    zeros = torch.zeros
    schedules.forward_step, schedules.backward_step = forward, backward
    schedules.torch.zeros = lambda *sizes, **fields: zeros(*sizes, **{**fields, "device": "cpu"})
    group, alone = Group(rank, size), Group(0, 1)
    groups = argparse.Namespace(tp=alone, cp=alone, embd=None, pos_embd=None, pp=group, dp_cp=alone)
    models = []
    for _ in range(chunks or 1):
        models.append(torch.nn.Identity())
        models[-1].config = config
        models[-1].model_type = schedules.ModelType.encoder_or_decoder
    run = (
        schedules.forward_backward_pipelining_with_interleaving
        if chunks
        else schedules.forward_backward_pipelining_without_interleaving
    )
    run(
        forward_step_func=None,
        data_iterator=[None] * chunks if chunks else None,
        model=models if chunks else models[0],
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=Silent(config, group),
        pg_collection=groups,
    )
    return order


def answer(text: str) -> dict[str, Any]:
    try:
        args = parsed(text)
        stages, config = stages_of(args)
        assert args.global_batch_size % args.micro_batch_size == 0
        size, share = config.pipeline_model_parallel_size, args.global_batch_size
        share //= args.micro_batch_size
        orders = [order_of(config, rank, share) for rank in range(size)] if size > 1 else []
    except (AssertionError, ValueError, RuntimeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"stages": stages, "orders": orders}


if __name__ == "__main__":
    print(json.dumps([answer(text) for text in json.load(sys.stdin)]))
