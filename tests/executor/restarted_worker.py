"""Two ranks, the first of which is killed when they are started for the first time.

The second time the other one comes later, and finds what was left of the first time no less.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

from executor.distributed.process_group import process_group

if __name__ == "__main__":
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not is_first and os.environ["RANK"] == "1":
        time.sleep(1.5)
    with process_group(torch.device("cpu"), timeout_s=30.0):
        total = torch.ones(1)
        dist.all_reduce(total)
        if is_first and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
    # One write: torchrun's Python has no buffer, and the other rank may write between two.
    print(f"rank {os.environ['RANK']}: {total.item():.0f}\n", end="", flush=True)
