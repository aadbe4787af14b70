"""A data set of a user that takes its time, and on one rank is killed once.

The environment says which rank is killed, at which of its samples, and the file that notes it.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor


class Rows:
    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s, self.taken = pause_s, 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.taken += 1
        if self.pause_s > 10:  # A test waits for the word.
            print("waiting for a row", flush=True)
        time.sleep(self.pause_s)
        note = Path(os.environ.get("KILL_NOTE", "/"))
        due = os.environ.get("KILL") == f"{os.environ.get('RANK')}:{self.taken}"
        if due and not note.exists():
            note.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        row = torch.randint(0, 256, (65,))  # Seeded for each sample.
        return {"ids": row[:-1], "target": row[1:]}
