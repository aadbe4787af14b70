"""The source of a training's microbatches, and the count of samples seen."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from itertools import islice
from typing import Any, TypeGuard

from torch import Tensor

from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from executor.launch.config import TrainingConfig
from executor.launch.prepare import Prepared
from executor.training.data import BatchOf, Source, batches, is_always_the_same
from executor.training.dataset import Dataset, DatasetBatches, fitted_entries, samples_of
from executor.training.stream import Stream, StreamBatches, open_data
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.tracing.factory import Form, batch_at, example_batch
from planner.tracing.lookups import too_small_for_text
from planner.tracing.user_code import FAILURES, one_line

logger = logging.getLogger(__name__)


class Feed:
    """The data of a training, from its first step on.

    Args:
        prepared: whose model and job say what a batch looks like.
        config: names the data, and its arguments.
        data: over the training file's, if not None.
        checkpoint: that the training goes on from, if any.
        first_step: number of the first iteration.

    Attributes:
        batch_of: ``(step, microbatch) -> batch``.

    Raises:
        PipeplanError: if the data cannot be read or does not fit the model.
    """

    def __init__(
        self,
        prepared: Prepared,
        config: TrainingConfig,
        data: str | Dataset | BatchOf | None,
        checkpoint: Checkpoint | None,
        first_step: int,
    ) -> None:
        job = prepared.plan.job
        self._per_step = prepared.plan.microbatches * job.samples_per_microbatch
        self._before = 0 if checkpoint is None else int(checkpoint.facts["samples_seen"])
        self._first_step = first_step
        source = config.data if data is None else data
        self._is_drawn = source == "random"
        self._microbatches = prepared.plan.microbatches
        self._state = None if checkpoint is None else checkpoint.facts.get("data_state")
        self.batch_of = self._batches(prepared, config, source)

    def samples_seen_after(self, step: int) -> int:
        """Samples of all iterations up to this one, those before a checkpoint included."""
        if isinstance(self.batch_of, DatasetBatches | StreamBatches):
            return self.batch_of.samples_seen_after(step)
        return self._before + (step + 1 - self._first_step) * self._per_step

    def state_after(self, step: int, ranks: Ranks) -> Any:
        """Return where a stateful stream is after a step, if any rank can say; all call it."""
        batch_of = self.batch_of
        if not isinstance(batch_of, StreamBatches) or not batch_of.stream.is_stateful:
            return None
        return next(filter(None, ranks.together(lambda: batch_of.state_after(step))), None)

    def warn_if_nothing_is_drawn(self) -> None:
        """Say so if all of the first step's random microbatches are one and the same."""
        if self._is_drawn and is_always_the_same(
            self.batch_of, self._first_step, self._microbatches
        ):
            logger.warning(
                "--data random: all %d microbatches of step %d are equal, so the loss says "
                "nothing; draw tensors in example_batch, by torch.randint or torch.randn",
                self._microbatches,
                self._first_step,
            )

    def _batches(
        self, prepared: Prepared, config: TrainingConfig, data: str | Dataset | BatchOf
    ) -> BatchOf:
        plan = prepared.plan
        if (made := _without_data_set(prepared, data, config.seed)) is not None:
            return made
        example = example_batch(prepared.model, plan.job)
        require_without(plan.job, "a map-style data set as --data", ["lengths"])
        found = open_data(data, config.data_arguments)
        where: dict[str, Any] = {"samples_seen": self._before, "first_step": self._first_step}
        if isinstance(found, Stream):
            state = self._state if found.is_stateful else None
            if self._before and state is None and prepared.place.rank == 0:
                logger.info("data %s: skips the %d samples seen before", found.name, self._before)
            return StreamBatches(
                found, example, plan.microbatches, config.seed, state=state, **where
            )
        name = data if isinstance(data, str) else None
        return DatasetBatches(found, example, plan.microbatches, config.seed, name=name, **where)


def _without_data_set(
    prepared: Prepared, data: str | Dataset | BatchOf, seed: int
) -> BatchOf | None:
    """Return the batches of text, of drawn tensors or of a function; None of a data set."""
    plan = prepared.plan
    if _is_function(data):
        return _checked(data, example_batch(prepared.model, plan.job), plan)
    if data not in ("text", "random"):
        return None
    source: Source = "text" if data == "text" else "random"
    return batches(source, prepared.model, plan.job, seed, too_small_for_text(prepared.lookups))


def _is_function(data: object) -> TypeGuard[BatchOf]:
    is_data_set = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    return callable(data) and not is_data_set and not inspect.isgeneratorfunction(data)


def validation_feed(
    prepared: Prepared, config: TrainingConfig, data: str | Dataset | BatchOf | None
) -> tuple[BatchOf, int]:
    """Return the batches of a validation, as of step 0, and how many there are.

    Args:
        prepared: whose model and job say what a batch looks like.
        config: names the data.
        data: over the training file's, if not None.

    Raises:
        PipeplanError: if there is none, it does not fit the model, or fills no microbatch.
    """
    plan, table = prepared.plan, config.validation
    assert table is not None
    source = table.data if data is None else data
    count = table.microbatches or plan.microbatches
    if source is None:
        raise PipeplanError(
            "validation.data: there is none; name text, random or module:factory of your own"
        )
    if (made := _without_data_set(prepared, source, config.seed + 1)) is not None:
        return made, count
    example = example_batch(prepared.model, plan.job)
    found, samples = open_data(source, table.data_arguments), samples_of(example)
    if isinstance(found, Stream):
        if table.microbatches is None:
            raise PipeplanError(
                f"validation.microbatches: {found.name} has no length; say how many of "
                f"{samples} samples a validation reads from its beginning"
            )
        found = list(islice(iter(found.begin()), count * samples))
    most = len(found) // samples
    if most < (table.microbatches or 1):
        raise PipeplanError(
            f"validation.data: {len(found)} samples fill {most} microbatches of {samples}, and "
            f"{table.microbatches or 1} are wanted; give more samples or fewer microbatches"
        )
    count = table.microbatches or most
    if len(found) > count * samples and prepared.place.rank == 0:
        left = len(found) - count * samples
        logger.info("validation: %d of %d samples are left out", left, len(found))
    batch_of = DatasetBatches(found, example, count, config.seed, first_step=0, shuffled=False)
    return batch_of, count


def _checked(function: BatchOf, example: Mapping[str, Tensor], plan: Plan) -> BatchOf:
    """The user's function, whose batches must fit what the plan was made for."""
    name = getattr(function, "__name__", type(function).__name__)
    lengths = plan.job.lengths
    examples = [example]
    if lengths is not None:
        examples = [batch_at(example, lengths, place) for place in range(len(lengths.tokens))]
    forms = [{entry: Form.of(tensor) for entry, tensor in row.items()} for row in examples]

    def batch_of(step: int, microbatch: int) -> Mapping[str, Tensor]:
        place = f"data {name}(step={step}, microbatch={microbatch})"
        number = 0
        if lengths is not None:
            number = lengths.of_iteration(step, plan.microbatches)[microbatch]
        try:
            found: object = function(step, microbatch)
        except FAILURES as error:
            raise PipeplanError(f"{place} failed: {one_line(error)}") from error
        return fitted_entries(found, forms[number], place, "the batch")

    return batch_of
