"""Runs a plan: ``torchrun --nproc-per-node N -m executor plan.json``.

Needs torch and the planner's artifacts, no solver. From Python, in the processes that torchrun
started: :func:`train`.
"""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.training.training import train

__all__ = ["train"]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    # Imported when first used: torch takes a while.
    if name == "train":
        from executor.training.training import train

        return train
    raise AttributeError(f"module 'executor' has no attribute {name!r}")
