"""Code of a user that goes wrong on one rank, in the backwards of step 2 or in the data set.

The environment says what happens (``FAULT``), where (``FAULT_RANK``) and which file gets the moment
(``FAULT_MOMENT``).
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from models.gpt import gpt_tiny

_CALLS_BEFORE = 6
"""Of four microbatches a step: it happens in the second."""
_calls = 0


def _go_wrong() -> None:
    global _calls
    _calls += 1
    if os.environ.get("RANK") != os.environ.get("FAULT_RANK") or _calls != _CALLS_BEFORE:
        return
    moment = Path(os.environ["FAULT_MOMENT"])
    moment.with_suffix(".part").write_text(f"{time.time()} {os.getpid()}")
    moment.with_suffix(".part").rename(moment)
    match os.environ["FAULT"]:
        case "exception":
            raise ValueError("no such review")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(600)


class Reviews:
    """A data set whose sample goes wrong."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _go_wrong()
        return {"ids": torch.full((64,), index), "target": torch.full((64,), index)}


def net() -> nn.Module:
    """A model whose backward goes wrong, on a rank that holds a layer norm."""
    model = gpt_tiny()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.bias.register_hook(_in_backward)
            # Once a microbatch and rank: the stages here have at least one of them each.
    return model


def _in_backward(gradient: Tensor) -> None:
    _go_wrong()
