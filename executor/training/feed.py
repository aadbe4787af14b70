"""The source of a training's microbatches, and the count of samples seen."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from executor.checkpoint.read import Checkpoint
from executor.launch.config import TrainingConfig
from executor.launch.prepare import Prepared
from executor.training.data import BatchOf, Source, batches, is_always_the_same
from executor.training.dataset import Dataset, DatasetBatches, fitted_entries, load_dataset
from planner.errors import PipeplanError, shorten
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.tracing.factory import Form, batch_at, example_batch
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
        self.batch_of = self._batches(prepared, config, source)

    def samples_seen_after(self, step: int) -> int:
        """Samples of all iterations up to this one, those before a checkpoint included."""
        if isinstance(self.batch_of, DatasetBatches):
            return self.batch_of.samples_seen_after(step)
        return self._before + (step + 1 - self._first_step) * self._per_step

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
        if data in ("text", "random"):
            source: Source = "text" if data == "text" else "random"
            too_small = prepared.too_small_for_text
            return batches(source, prepared.model, plan.job, config.seed, too_small)
        example = example_batch(prepared.model, plan.job)
        if callable(data) and not hasattr(data, "__getitem__"):
            return _checked(data, example, plan)
        require_without(plan.job, "a map-style data set as --data", ["lengths"])
        name = data if isinstance(data, str) else None
        dataset: Any = data if name is None else load_dataset(name, config.data_arguments)
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise PipeplanError(
                f"data: {shorten(data)} is of type {type(data).__name__}; expected 'text', "
                "'random', module:factory, a map-style data set with a length and [index], or a "
                "function (step, microbatch) -> batch"
            )
        return DatasetBatches(
            dataset,
            example,
            plan.microbatches,
            config.seed,
            samples_seen=self._before,
            first_step=self._first_step,
            name=name,
        )


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
