"""What the trainer asks of synchronisation strategies, which inherit what they have no use for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from executor.runtime.runtime import Recorder
from executor.sync.divided_layers import DividedLayers
from executor.sync.gradients import SharedGradients
from executor.training.optimisation import Optimisation, StepOutcome
from planner.plan.programs import Reduce
from planner.sync.strategies import Options

Optimise = Callable[[], StepOutcome]
"""Clips the gradients that the parameters hold, and lets the optimizer step on them."""


class Synchronisation:
    """A strategy, on one rank, for one training.

    The calls of an iteration come in this order: :meth:`begin`, then :meth:`ready` for each shared
    parameter and :meth:`start` for each reduction of the rank's program while forwards and
    backwards run, then :meth:`finish`, then :meth:`update`; :meth:`settle` before anybody reads the
    weights, and :meth:`close` at the end.

    Attributes:
        announced: whether :meth:`ready` is called for each gradient that is complete.
        gated: whether :meth:`before_use` is called before a forward uses parameters.
    """

    announced = False
    gated = False

    def begin(self, step: int) -> None:
        """An iteration begins: no parameter has a gradient, the first forward is next."""

    def ready(self, name: str) -> None:
        """This rank adds no more to a shared parameter's gradient in this iteration.

        Only called if the strategy is :attr:`announced`.
        Autograd may call it on a thread of its own, while the trainer waits for the backward.
        """

    def before_use(self, names: Iterable[str]) -> None:
        """A forward is about to use these parameters, if the strategy is :attr:`gated`."""

    def start(self, reduce: Reduce) -> None:
        """This rank's last backward that adds to these gradients is done."""

    def finish(self) -> None:
        """All backwards are done; exact strategies wait here until gradients agree."""

    def update(self, optimise: Optimise) -> StepOutcome:
        """Let the optimizer step, now or later, and what belongs to it before and after."""
        return optimise()

    def settle(self) -> None:
        """Bring to an end what is under way: the weights are those after the last iteration."""

    def close(self) -> None:
        """No iteration follows."""


class DecentralizedStrategy:
    """A strategy between pipelines, on one rank, which trains in step with its own pipeline alone.

    Attributes:
        reduced: whether the last step's exchange succeeded.
    """

    reduced = True

    def begin(self, step: int) -> None:
        """An iteration begins; who takes part is in the neighbours."""

    def update(self, step: int, optimise: Optimise) -> StepOutcome:
        """Let the optimizer step, and exchange what the strategy exchanges."""
        raise NotImplementedError

    def settle(self) -> None:
        """End what is under way; the rank's weights are its own best now."""

    def reload(self) -> None:
        """The rank's weights were replaced by a donor's."""


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
        shards_state: whether ranks that hold the same parameters share their optimizer state.
        divided: layers of whose weights this rank has a part; None: there are none.
    """

    options: Options
    shared: Sequence[SharedGradients]
    process_groups: Mapping[tuple[int, ...], Any]
    recorder: Recorder
    optimisation: Optimisation
    own_share: Mapping[str, float] = field(default_factory=dict)
    shards_state: bool = False
    divided: DividedLayers | None = None
