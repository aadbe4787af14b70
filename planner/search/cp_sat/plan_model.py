"""The plan model: stages on devices under the user's rules, by a time that they need at least.

For a number of stages S, literals y(s, b, e) say that stage s is made of the layers [b, e), x(s, d)
that device d holds it, and integers n(s, k) how many microbatches a device of type k runs of it at
most. With w the seconds of a forward and a backward of one microbatch, the model minimises a time T
with, for every stage and type, T >= head + n(s, k) w(s, k), where ``head`` is the least time before
the first microbatch reaches the stage, and for replicas that are joined by slow links alone
T >= head + the time of their gradients on the widest of these. Messages between stages are left
out but for their least time in ``head``.

T orders stages; it proves nothing about plans (:mod:`planner.bounds` does). Its solutions keep all
rules, and are stages to schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from planner.costs.network_table import NetworkTable
from planner.costs.stage_table import NEVER, StageTable
from planner.errors import PipeplanError
from planner.search.cp_sat.decisions import Constrain, Decisions

TICKS = 50_000
"""Ticks in the longest time that the model tells apart."""
MOST_CUTS = 48
"""Most places at which stages may begin; more are thinned to equal shares of the time."""
SLOW_LINKS = 3
"""Kinds of narrow links, the narrowest first, over which replicas count their gradients."""


class PlannedStage(NamedTuple):
    """The layers [first, last) on devices, by their numbers in the cluster."""

    first: int
    last: int
    devices: tuple[int, ...]


Stages = tuple[PlannedStage, ...]


@dataclass(frozen=True)
class Effort:
    """How long CP-SAT may work on one model.

    Attributes:
        seconds: of wall time, or deterministic ones.
        deterministic: which of the two.
        seed: of random numbers.
        spend: told of the deterministic seconds that a model of schedules took.
    """

    seconds: float
    deterministic: bool = False
    seed: int = 0
    spend: Callable[[float], None] = lambda seconds: None

    def solver(self) -> cp_model.CpSolver:
        """Return a solver with this limit, on one thread."""
        solver = cp_model.CpSolver()
        solver.parameters.random_seed = self.seed
        solver.parameters.num_workers = 1
        # Ctrl-C ends the whole search, which asks each solver to stop.
        solver.parameters.catch_sigint_signal = False
        # Probing in presolve of OR-Tools 9.15 calls some feasible models infeasible (one is kept in
        # tests/solver/probed_infeasible.txt), which would prove what is false.
        solver.parameters.cp_model_probing_level = 0
        # The linear relaxation is weak here: without it the same stages come in half of the time.
        solver.parameters.linearization_level = 0
        if self.deterministic:
            solver.parameters.max_deterministic_time = max(self.seconds, 1e-3)
        else:
            solver.parameters.max_time_in_seconds = max(self.seconds, 1e-3)
        return solver


@dataclass(frozen=True)
class PlanModels:
    """The models of one problem, by number of stages.

    Args:
        table: of the problem.
        network: of its cluster.
        constrain: the rules, each of which adds constraints.
    """

    table: StageTable
    network: NetworkTable
    constrain: Sequence[Constrain] = ()

    def starts(self, effort: Effort, counts: Sequence[int]) -> Iterator[list[Stages]]:
        """Yield, for each number of stages, all solutions on the way to the best, that one last.

        Args:
            effort: for each number.
            counts: numbers of stages.
        """
        for count in counts:
            yield self.model(count).solve(effort)

    def model(self, count: int) -> PlanModel:
        """Return the model of a number of stages."""
        return PlanModel(self, count)

    def near(self, stages: Stages, free: range, effort: Effort) -> list[Stages]:
        """Return better stages, by the model's time, of which only some differ from given ones.

        Args:
            stages: that keep the rules.
            free: numbers of the stages that may change, among themselves and to unused devices.
            effort: of the search.
        """
        model = self.model(len(stages))
        model.fix(stages, [j for j in range(len(stages)) if j not in free])
        model.hint(stages)
        return model.solve(effort)

    def keeps(self, stages: Stages, effort: Effort) -> bool:
        """Return whether stages keep all rules; also False if the effort does not suffice."""
        model = self.model(len(stages))
        if not model.has(stages):
            return False
        model.fix(stages, range(len(stages)))
        return bool(model.solve(effort))

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Places at which a stage may begin, besides the first layer."""
        allowed = self.table.problem.job.cuts
        names = self.table.layers
        places = [n for n in range(1, len(names)) if allowed is None or names[n] in allowed]
        if len(places) <= MOST_CUTS:
            return tuple(places)
        seconds = self.table.arrays.seconds[:, :, :2].sum(axis=(0, 2)).cumsum()
        shares = np.linspace(0, seconds[-1], MOST_CUTS + 2)[1:-1]
        ends = seconds[[n - 1 for n in places]]
        return tuple(sorted({places[int(np.abs(ends - share).argmin())] for share in shares}))

    @cached_property
    def work_s(self) -> NDArray[np.float64]:
        """Seconds of a forward and a backward, K x N x (N + 1)."""
        rows, backward = self.table.all_figures(), self.table.problem.job.backward
        split_s = rows["I_s"] + rows["W_s"]
        back_s = {
            "whole": rows["B_s"],
            "split": split_s,
            "any": np.minimum(rows["B_s"], split_s),
        }[backward]
        found: NDArray[np.float64] = rows["F_s"] + back_s
        return found

    @cached_property
    def forward_s(self) -> NDArray[np.float64]:
        """Seconds of a forward on the fastest type, N x (N + 1)."""
        found: NDArray[np.float64] = self.table.all_figures()["F_s"].min(axis=0)
        return found

    @cached_property
    def gradient_bytes(self) -> NDArray[np.int64]:
        """Bytes that replicas of a stage reduce, N x (N + 1)."""
        found: NDArray[np.int64] = self.table.all_figures()["gradient_bytes"].min(axis=0)
        return found

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """Whether a type can hold a stage and one microbatch of it, K x N x (N + 1)."""
        job, arrays = self.table.problem.job, self.table.arrays
        reruns = (0, NEVER if job.recompute else 0)
        holders = len(self.network.devices) if job.shards_state else 1
        lean = [self.table.all_figures(rerun=rerun, holders=holders) for rerun in reruns]
        needs = np.minimum(
            *(row["static_bytes"] + row["stash_bytes"] + row["workspace_bytes"] for row in lean)
        )
        needs += arrays.crossing[:, None, :]
        kinds = range(len(self.table.types))
        capacity = [self._capacity(kind) for kind in kinds]
        found: NDArray[np.bool_] = needs <= np.array(capacity)[:, None, None]
        return np.logical_and(found, lean[0]["may_run"] > 0)

    def _capacity(self, kind: int) -> int:
        held = self.network.capacity_bytes[self.network.type_of == kind]
        return int(held[0]) if len(held) else 0


class PlanModel(Decisions):
    """The model of a number of stages; rules are added when it is made.

    Args:
        models: what all numbers of stages share.
        count: number of stages.
    """

    def __init__(self, models: PlanModels, count: int) -> None:
        problem = models.table.problem
        super().__init__(models.table.layers, problem.cluster, count, models.cuts)
        self._models = models
        slowest_s = float(models.work_s[:, 0, -1].max()) * problem.job.microbatches
        self.tick_s = max(slowest_s, 1e-9) / TICKS
        self.time = self.model.new_int_var(0, 2 * TICKS, "time")
        self.model.minimize(self.time)
        self._types = np.unique(models.network.type_of).tolist()
        self._head = [self.model.new_int_var(0, 2 * TICKS, "") for _ in self.stages]
        self._microbatches()
        self._heads()
        self._gradients()
        for constrain in models.constrain:
            returned: object = constrain(self)
            if returned is not None:
                raise PipeplanError(
                    f"constrain: it returns {type(returned).__name__}, which adds nothing; pass "
                    "constraints to decisions.model.add"
                )

    def _ticks(self, seconds: float) -> int:
        return int(min(seconds / self.tick_s, 2 * TICKS))

    def _of_stage(self, j: int) -> Iterator[tuple[int, int, cp_model.IntVar]]:
        return ((b, e, y) for (s, b, e), y in self.intervals.items() if s == j)

    def _microbatches(self) -> None:
        """Give every microbatch a replica of every stage, and the time the work that this is."""
        job, numbers = self._models.table.problem.job, range(len(self.devices))
        equal = self.model.new_int_var(1, len(self.devices), "replicas of every stage")
        for j in self.stages:
            held = sum(self.on[j, d] for d in numbers)
            if job.equal_pipelines:
                self.model.add(held == equal)
            if not job.replication:
                self.model.add(held == 1)
            runs = [self.model.new_int_var(0, job.microbatches, "") for _ in numbers]
            self.model.add(sum(runs) == job.microbatches)
            for d, count in enumerate(runs):
                self.model.add(count == 0).only_enforce_if(~self.on[j, d])
                self.model.add(count >= 1).only_enforce_if(self.on[j, d])
            for kind in self._types:
                self._work(j, kind, runs)

    def _work(self, j: int, kind: int, runs: Sequence[cp_model.IntVar]) -> None:
        of_kind = [d for d in range(len(runs)) if self._models.network.type_of[d] == kind]
        most = self.model.new_int_var(0, self._models.table.problem.job.microbatches, "")
        for d in of_kind:
            self.model.add(runs[d] <= most)
        for b, e, y in self._of_stage(j):
            if not self._models.fits[kind, b, e]:
                for d in of_kind:
                    self.model.add_bool_or([~y, ~self.on[j, d]])
                continue
            work = self._ticks(float(self._models.work_s[kind, b, e]))
            self.model.add(self.time >= self._head[j] + work * most).only_enforce_if(y)

    def _heads(self) -> None:
        for before, j in pairwise(self.stages):
            ahead = [
                self._ticks(float(self._models.forward_s[b, e])) * y
                for b, e, y in self._of_stage(before)
            ]
            self.model.add(self._head[j] >= self._head[before] + sum(ahead))

    def _gradients(self) -> None:
        """Count gradients of replicas one of which reaches no other over a wider link."""
        widths = self._models.network.gb_per_s.copy()
        np.fill_diagonal(widths, np.inf)
        slow = sorted({float(w) for w in widths[np.isfinite(widths) & (widths > 0)]})[:SLOW_LINKS]
        apart = {
            width: [
                d for d, row in enumerate(widths) if row[np.isfinite(row)].max(initial=0) <= width
            ]
            for width in slow
        }
        for j in self.stages:
            several = self._are_several([self.on[j, d] for d in range(len(self.devices))])
            for width, devices in apart.items():
                is_slow = self.model.new_bool_var("")
                for d in devices:
                    self.model.add_implication(self.on[j, d], is_slow)
                for b, e, y in self._of_stage(j):
                    ticks = self._ticks(self._models.gradient_bytes[b, e] / (width * 1e9))
                    if ticks:
                        self.model.add(self.time >= self._head[j] + ticks).only_enforce_if(
                            [y, several, is_slow]
                        )

    def _are_several(self, literals: Sequence[cp_model.IntVar]) -> cp_model.IntVar:
        """Return a literal that is true if two of them are."""
        found = self.model.new_bool_var("")
        self.model.add(sum(literals) <= 1).only_enforce_if(~found)
        return found

    def has(self, stages: Stages) -> bool:
        """Return whether the model can decide these stages: as many, at its cuts, one a device."""
        held = [d for stage in stages for d in stage.devices]
        return (
            len(stages) == len(self.stages)
            and len(set(held)) == len(held)
            and all((j, s.first, s.last) in self.intervals for j, s in enumerate(stages))
        )

    def fix(self, stages: Stages, numbers: Sequence[int]) -> None:
        """Decide some stages as given."""
        for j in numbers:
            stage = stages[j]
            self.model.add(self.intervals[j, stage.first, stage.last] == 1)
            for d in range(len(self.devices)):
                self.model.add(self.on[j, d] == int(d in stage.devices))

    def hint(self, stages: Stages) -> None:
        """Let the search begin near given stages."""
        for (j, b, e), y in self.intervals.items():
            self.model.add_hint(y, int((b, e) == stages[j][:2]))
        for (j, d), x in self.on.items():
            self.model.add_hint(x, int(d in stages[j].devices))

    def solve(self, effort: Effort) -> list[Stages]:
        """Return all solutions on the way to the best found, that one last; empty if none is.

        Raises:
            PipeplanError: if a rule made the model invalid.
        """
        seen = _Seen(self)
        solver = effort.solver()
        status = solver.solve(self.model, seen)
        self.is_infeasible = status == cp_model.INFEASIBLE
        return seen.found


class _Seen(cp_model.CpSolverSolutionCallback):
    """Keeps every solution."""

    def __init__(self, model: PlanModel) -> None:
        super().__init__()
        self._model = model
        self.found: list[Stages] = []

    def on_solution_callback(self) -> None:
        """Read the stages of a solution."""
        layers = [key for key, y in self._model.intervals.items() if self.boolean_value(y)]
        self.found.append(
            tuple(
                PlannedStage(
                    b,
                    e,
                    tuple(
                        d
                        for d in range(len(self._model.devices))
                        if self.boolean_value(self._model.on[j, d])
                    ),
                )
                for j, b, e in sorted(layers)
            )
        )
