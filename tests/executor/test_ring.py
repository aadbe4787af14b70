"""Sums around a ring of ranks, of several buffers one after the other."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from launch import environment
from warm_python import warm_python

pytestmark = pytest.mark.extensive

_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from executor.sync.halves import Ring

path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=size)
# In an order of their own, and with a rank that takes no part.
group = dist.new_group([2, 0, 3, 1][:size - 1] if size == 5 else list(range(size)))
if rank < size - (size == 5):
    ring, place, ranks = Ring(group), dist.get_rank(group), dist.get_process_group_ranks(group)
    futures, buffers = [], []
    for number in range(3):
        seeds = [torch.Generator().manual_seed(10 * r + number) for r in ranks]
        each = [torch.randn(6 * len(ranks), generator=seed) for seed in seeds]
        buffers.append((each[place], torch.stack(each).sum(0)))
        futures.append(ring.reduce_scatter(buffers[-1][0]))
    for future, (mine, total) in zip(futures, buffers):
        future.result(timeout=600)
        part = slice(6 * place, 6 * place + 6)
        assert torch.allclose(mine[part], total[part], atol=1e-5), (mine[part], total[part])
    ring.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_has_the_sum_of_its_part(tmp_path: Path, size: int) -> None:
    """Of five ranks four are in the ring."""
    command = [warm_python(), "-c", _SCRIPT, str(tmp_path / "meeting")]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(size)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            cwd=os.path.dirname(__file__),
        )
        for rank in range(size)
    ]
    ends = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * size, ends
