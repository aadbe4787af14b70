"""What every strategy is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from executor.optimisation import Optimisation
from executor.recorder import Recorder
from executor.sync.buckets import SharedGradients
from planner.sync.strategies import Options


@dataclass(frozen=True)
class Setting:
    """One rank's part of a training, as a strategy sees it.

    Attributes:
        options: of the strategy, checked.
        shared: what other ranks hold too, in the order of reductions, which all ranks have.
        process_groups: by their ranks.
        recorder: told of all that runs.
        optimisation: trains this rank's parameters.
        own_share: by name, the share of the whole gradient that this rank's microbatches make; 1
            for parameters that are not there.
    """

    options: Options
    shared: Sequence[SharedGradients]
    process_groups: Mapping[tuple[int, ...], Any]
    recorder: Recorder
    optimisation: Optimisation
    own_share: Mapping[str, float] = field(default_factory=dict)
