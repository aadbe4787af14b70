"""The source of a training's microbatches, and the count of samples seen."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Set
from itertools import islice
from typing import Any, TypeGuard

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from executor.checkpoint.ranks import Ranks
from executor.checkpoint.read import Checkpoint
from executor.launch.config import TrainingConfig
from executor.launch.prepare import Prepared
from executor.training.batches import BatchOf, batches, is_always_the_same
from executor.training.samples import (
    Dataset,
    DatasetBatches,
    SampleBatches,
    Stream,
    StreamBatches,
    fitted_entries,
    samples_of,
)
from planner.errors import PipeplanError, shorten
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.tracing.factory import Form, batch_at, example_batch
from planner.tracing.lookups import too_small_for_text
from planner.tracing.user_code import FAILURES, import_callable, one_line

logger = logging.getLogger(__name__)
Data = str | Dataset | BatchOf
KINDS_OF_DATA = (
    "'text', 'random', module:factory, a map-style data set with a length and [index], an iterable "
    "one, a generator function, or a function (step, microbatch) -> batch"
)


class Feed:
    """The data of a training, from its first step on.

    Args:
        prepared: whose model and job say what a batch looks like.
        config: names the data, and its arguments.
        data: over the training file's, if not None.
        checkpoint: that the training resumes from, if any.
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
        data: Data | None,
        checkpoint: Checkpoint | None,
        first_step: int,
    ) -> None:
        plan, data = prepared.plan, config.data if data is None else data
        self._per_step = plan.microbatches * plan.job.samples_per_microbatch
        self._microbatches = plan.microbatches
        self._before = 0 if checkpoint is None else int(checkpoint.facts["samples_seen"])
        self._first_step = first_step
        self._is_drawn = data == "random"
        own = _without_data_set(prepared, data, config.seed)
        state = None if checkpoint is None else checkpoint.facts.get("data_state")
        self.batch_of = own or self._of_samples(prepared, config, data, state)

    def _of_samples(
        self, prepared: Prepared, config: TrainingConfig, data: Data, state: Any
    ) -> BatchOf:
        plan = prepared.plan
        require_without(plan.job, "a map-style data set as --data", ["lengths"])
        found = open_data(data, config.data_arguments)
        example = example_batch(prepared.model, plan.job)
        how = example, plan.microbatches, config.seed
        where: dict[str, Any] = {"samples_seen": self._before, "first_step": self._first_step}
        if not isinstance(found, Stream):
            name = data if isinstance(data, str) else None
            return DatasetBatches(found, *how, name=name, **where)
        state = state if found.is_stateful else None
        if self._before and state is None and prepared.place.rank == 0:
            logger.info("data %s: skips the %d samples seen before", found.name, self._before)
        return StreamBatches(found, *how, state=state, **where)

    def samples_seen_after(self, step: int) -> int:
        """Samples of all iterations up to this one, those before a checkpoint included."""
        if isinstance(self.batch_of, SampleBatches):
            return self.batch_of.samples_seen_after(step)
        return self._before + (step + 1 - self._first_step) * self._per_step

    def state_after(self, step: int, ranks: Ranks) -> Any:
        """Return where a stateful stream is after a step, if any rank can say; all call it."""
        batch_of = self.batch_of
        if not isinstance(batch_of, StreamBatches) or not batch_of.stream.is_stateful:
            return None
        return next(filter(None, ranks.together(lambda: batch_of.state_after(step))), None)

    def warn_if_nothing_is_drawn(self) -> None:
        """Warn if all random microbatches of the first step are equal."""
        count, step = self._microbatches, self._first_step
        if self._is_drawn and is_always_the_same(self.batch_of, step, count):
            logger.warning(
                "--data random: all %d microbatches of step %d are equal, so the loss says "
                "nothing; draw tensors in example_batch, by torch.randint or torch.randn",
                *(count, step),
            )


def validation_feed(
    prepared: Prepared, config: TrainingConfig, data: Data | None
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
    data = table.data if data is None else data
    count = table.microbatches or plan.microbatches
    if data is None:
        raise PipeplanError(
            "validation.data: there is none; name text, random or module:factory of your own"
        )
    if (made := _without_data_set(prepared, data, config.seed + 1)) is not None:
        return made, count
    example = example_batch(prepared.model, plan.job)
    found, samples = open_data(data, table.data_arguments), samples_of(example)
    if isinstance(found, Stream):
        if table.microbatches is None:
            raise PipeplanError(
                f"validation.microbatches: {found.name} has no length; say how many of "
                f"{samples} samples a validation reads from its beginning"
            )
        found = list(islice(iter(found.begin()), count * samples))
    most = len(found) // samples
    count = table.microbatches or max(1, most)
    if most < count:
        raise PipeplanError(
            f"validation.data: {len(found)} samples fill {most} microbatches of {samples}, and "
            f"{count} are wanted; give more samples or fewer microbatches"
        )
    if len(found) > count * samples and prepared.place.rank == 0:
        left = len(found) - count * samples
        logger.info("validation: %d of %d samples are left out", left, len(found))
    batch_of = DatasetBatches(found, example, count, config.seed, first_step=0, shuffled=False)
    return batch_of, count


def _without_data_set(prepared: Prepared, data: Data, seed: int) -> BatchOf | None:
    """Return the batches of text, of drawn tensors or of a function; None of a data set."""
    job = prepared.plan.job
    if _is_function(data):
        return _checked(data, example_batch(prepared.model, job), prepared.plan)
    if data == "text":
        return batches("text", prepared.model, job, seed, too_small_for_text(prepared.lookups))
    return batches("random", prepared.model, job, seed) if data == "random" else None


def _is_function(data: object) -> TypeGuard[BatchOf]:
    is_data_set = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    return callable(data) and not is_data_set and not inspect.isgeneratorfunction(data)


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


def open_data(data: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a map-style data set or a :class:`Stream` of what the user named or gave.

    Only call this with a name the user typed: importing runs code.

    Args:
        data: ``module:factory``, a data set, or a generator function.
        arguments: keyword arguments of the factory.

    Raises:
        PipeplanError: if making it fails, or it is no data set.
    """
    name, make = _maker(data)
    try:
        found = make(**arguments)
    except FAILURES as error:
        given = f" with data_arguments {shorten(dict(arguments), 400)}" if arguments else ""
        raise PipeplanError(
            f"data {name!r}{given} cannot be made: {one_line(error)}; expected a map-style data "
            "set, with a length and [index], or an iterable one"
        ) from error
    kind = type(found).__name__
    if isinstance(found, DataLoader):
        raise PipeplanError(
            f"data {name!r}: a DataLoader makes batches of its own, and a plan has microbatches of "
            "a fixed size; give the data set that it reads"
        )
    is_map = hasattr(found, "__getitem__") and not isinstance(found, IterableDataset)
    # The order of a set differs between processes.
    if not is_map and hasattr(found, "__iter__") and not isinstance(found, Set):
        if not hasattr(found, "__next__"):
            return Stream(lambda: found, found, name)
        if make(**arguments) is found:
            raise PipeplanError(
                f"data {name!r}: an iterator can be read only once, and restarts read it again; "
                "give the generator function, or a data set with __iter__"
            )
        return Stream(lambda: make(**arguments), found, name)
    if not is_map:
        raise PipeplanError(f"data: {shorten(found)} is of type {kind}; expected {KINDS_OF_DATA}")
    try:
        size = len(found)
    except FAILURES as error:
        raise PipeplanError(
            f"data {name!r}: a {kind} has no length: {one_line(error)}; expected {KINDS_OF_DATA}"
        ) from error
    if size < 1:
        raise PipeplanError(
            f"data {name!r}: a {kind} of {size} samples; expected a map-style data set with a "
            "length of at least 1, and [index]"
        )
    return found


def _maker(data: Any) -> tuple[str, Callable[..., Any]]:
    """Return the name of the data, and what makes it."""
    if isinstance(data, str):
        return data, import_callable(data, "data", "lib.data:reviews")
    name = getattr(data, "__name__", type(data).__name__)
    return name, data if inspect.isgeneratorfunction(data) else lambda: data
