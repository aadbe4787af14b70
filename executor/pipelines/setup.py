"""A training beside others as one rank has it before it meets them."""

from __future__ import annotations

from executor.checkpoint import Checkpoint
from executor.config import TrainingConfig
from executor.coordinator.supervised import Work, work_of
from executor.faults import Faults, parse_faults
from executor.feed import Feed
from executor.limits import DEFAULT_GROUP_TIMEOUT_S, require_timeout
from executor.pipelines.seat import seat_of
from executor.pipelines.steps import WholeSteps
from executor.prepare import Prepared, prepare
from executor.process_group import device_of_this_process, require_backend
from executor.run import Run, autocast_of
from executor.saved_state import SavedState
from planner.artifacts.document import require_file_path
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.lane_plan import lane_plan
from planner.sync.lanes import IN_STEP, lanes_of
from planner.sync.strategies import options_of
from planner.verifier import require_valid


class Setup:
    """What this rank has read, checked and built on its own.

    Args:
        plan: with all pipelines, and the strategy.
        config: of the training.
        run: how it is run.

    Attributes:
        lanes: the pipelines of the plan.
        seat: of this process.
        options: of the strategy.
        injected: faults on purpose, of all pipelines.
        faults: those of this one.
        device: of this process.
        prepared: this rank's stages.
        saved: its part of a checkpoint.
        checkpoint: that the training goes on from, if any.
        steps: of the whole training.
        feed: of this pipeline.

    Raises:
        PipeplanError: if the plan cannot be run so.
    """

    def __init__(self, plan: Plan, config: TrainingConfig, run: Run) -> None:
        require_valid(plan)
        _require_known(config)
        self.plan = plan
        self.config = config
        self.run = run
        self.lanes = lanes_of(plan)
        self.seat = seat_of(plan, self.lanes, run.pipeline, run.coordinator)
        self.options = options_of(plan.sync)
        if run.group_timeout_s is not None:
            require_timeout(run.group_timeout_s, "group_timeout_s")
        self.injected = parse_faults(run.inject, len(self.lanes))
        self.faults = Faults(self.injected, self.seat.pipeline)
        if run.sync_trace is not None:
            require_file_path(run.sync_trace)
        self.checkpoint = None if run.resume is None else Checkpoint.open(run.resume)
        self.device = device_of_this_process(run.device)
        require_backend(run.backend, self.device)
        self.prepared = self._prepare()
        self.saved = SavedState(self.prepared, config.seed)
        before = 0 if self.checkpoint is None else self.saved.require_fits(self.checkpoint)
        self.steps = WholeSteps(before, len(self.lanes))
        self.feed = Feed(self.prepared, config, run.data, self.checkpoint, 1)
        if self.seat.tells and self.seat.pipeline == 0:
            self.feed.tell_if_nothing_is_drawn()

    def _prepare(self) -> Prepared:
        return prepare(
            lane_plan(self.plan, self.lanes[self.seat.pipeline]),
            self.run.model,
            loss=self.run.loss,
            seed=self.config.seed,
            device=self.device,
            autocast=autocast_of(self.config),
            place=self.seat.place,
        )

    @property
    def work(self) -> Work:
        """What the coordinator hands out."""
        return work_of(self.plan, self.config.steps - self.steps.before, self.plan.sync)

    @property
    def share_size(self) -> int:
        """Microbatches of a share."""
        return len(self.lanes[self.seat.pipeline].microbatches)

    @property
    def ranks(self) -> list[int]:
        """In the whole plan, of this pipeline's places."""
        devices = self.lanes[self.seat.pipeline].devices
        return [self.plan.ranks.index(device) for device in devices]

    @property
    def group_timeout_s(self) -> float:
        """Whoever lets others of its group wait for so long is left out."""
        given_s = self.run.group_timeout_s
        return DEFAULT_GROUP_TIMEOUT_S if given_s is None else given_s


def _require_known(config: TrainingConfig) -> None:
    if config.timeline is not None:
        raise PipeplanError(
            "timeline: pipelines that run side by side have no common iteration to draw; leave it "
            f"out, or use {IN_STEP}"
        )
