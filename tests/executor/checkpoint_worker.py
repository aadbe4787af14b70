"""One rank of a checkpoint's test: ``torchrun --nproc-per-node 2 checkpoint_worker.py FOLDER``.

The ranks write a checkpoint, read each other's tensors, and fail together when one cannot write.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from executor.checkpoint import Checkpoint, Ranks, save_checkpoint
from planner.errors import PipeplanError


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = Ranks.of_process_group()
    save_checkpoint(folder, 3, {f"parameters/{rank}": torch.full((2,), rank)}, {}, ranks=ranks)
    other = f"parameters/{1 - rank}"
    assert Checkpoint.open(folder).read([other])[other].tolist() == [1 - rank] * 2
    dtype = torch.complex128 if rank else torch.float32
    message = "rank 1: a checkpoint holds no tensors of type torch.complex128"
    with pytest.raises(PipeplanError, match=message):
        save_checkpoint(folder, 4, {str(rank): torch.zeros(1, dtype=dtype)}, {}, ranks=ranks)
    assert Checkpoint.open(folder).step == 3
    # One write: torchrun's Python has no buffer, and the other rank may write between two.
    print(f"rank {rank} done\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
