"""What the workers of exports have in common: every folder of exports, in a gloo group."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def check_each(check: Callable[[Path], None], exports: str) -> None:
    """Check the folders in the one that the command line names, and say on rank 0 how many agree.

    Args:
        check: asserts that one export agrees with a single process.
        exports: what they are called.
    """
    dist.init_process_group("gloo")
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    for folder in folders:
        check(folder)
        dist.barrier()
    if dist.get_rank() == 0:
        print(f"{len(folders)} {exports} agree with a single process")
    dist.destroy_process_group()
