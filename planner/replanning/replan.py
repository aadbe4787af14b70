"""``replan``: a plan for changed machines, near the one that training ran with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.plan.moves import Moves
from planner.plan.operations import compress_devices
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.prediction import with_strategy
from planner.replanning.choice import Alternative, choose
from planner.replanning.repair import repair
from planner.replanning.state import State, moves_between
from planner.search.budget import Clock, Settings, TimeShare, TimeSlice
from planner.search.finished import ended_by, limit_text, plan_of
from planner.search.result import Ended, unjoined_devices
from planner.search.settings import DEFAULT_WORKERS, check_settings
from planner.search.solve import STEPS, SearchStep, best_of, run_until_stopped
from planner.search.state import Progress, Search, SearchTask
from planner.search.steps import relax_cluster
from planner.sync.strategies import SYNCHRONOUS, options_of
from planner.variants.machine_changes import (
    MachineChanges,
    NewMachines,
    SlowedDevice,
    Twin,
    new_machines,
    parse_added,
    parse_slow,
)
from planner.verification import require_valid
from planner.verification.form import stage_problems

SLACK = 0.05
"""Share by which a plan may be slower than the fastest found if it moves fewer bytes."""
TIME_LIMIT_S = 1.5
"""Limit of the search; the command then takes about 4 s of a core for 64 GPUs, all in all."""
GAP_LIMIT = 1e-4
STEPS_AFTER = tuple(step for step in STEPS if step.run is not relax_cluster)
"""Steps after the repairs. Relaxations take seconds for their first bound; certificates do not."""


@dataclass(frozen=True)
class Replanned:
    """A plan for other machines, and what it takes to go on by it.

    Attributes:
        plan: the plan, verified, with the bound that was proved for the new machines.
        moves: what its devices lack, and who has it.
        alternatives: the choice, the fastest plan found and the one that moves least.
        slack: by which the choice may be slower than the fastest found.
        old_iteration_time_s: what the old plan was predicted to take on the old machines.
        ended: why the search ended.
        search_s: how long it took, in the seconds of the limit.
        notes: what the new plan does not keep of the old one.
    """

    plan: Plan
    moves: Moves
    alternatives: tuple[Alternative, ...]
    slack: float
    old_iteration_time_s: float
    ended: Ended
    search_s: float
    notes: tuple[str, ...] = ()

    @property
    def iteration_time_s(self) -> float:
        """Predicted time of one iteration."""
        return self.plan.predicted.iteration_time_s


def replan(
    plan: Plan,
    *,
    lost: Sequence[str] = (),
    slow: Mapping[str, float] | Sequence[SlowedDevice] = (),
    added: Sequence[str | Path | Twin] = (),
    cluster: Cluster | None = None,
    slack: float = SLACK,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    deterministic: bool = False,
    progress: Progress | None = None,
) -> Replanned:
    """Find a plan of the same training for the machines that are left or came.

    Model and job stay, so an iteration is the same samples and the same mathematics; of a plan of
    tensor-parallel groups their size stays too. Of the plans
    found that are at most ``slack`` slower than the fastest found, the one is taken whose devices
    lack the fewest bytes of parameters and optimizer state.

    Args:
        plan: that training ran by.
        lost: devices that are gone, or nodes for all of their devices.
        slow: devices or nodes that take so many times as long for everything.
        added: cluster files of devices and links that came, or ``NAME=LIKE`` for a device or node
            with the type and links of another.
        cluster: all machines there are now, in place of ``lost`` and ``added``; a device of the
            plan, by name, is taken to hold what it held.
        slack: a share of at least 0.
        time_limit_s: of the search; seconds of CP-SAT's deterministic time in deterministic mode.
            Making the first plan takes what it takes.
        seed: of the solver's searches.
        workers: threads of the solver.
        deterministic: the same plan on every machine.
        progress: called with every new incumbent or bound.

    Raises:
        InfeasibleError: if no plan fits what is left; the message says which constraint binds.
        PipeplanError: naming an unknown device, a clash of names or a wrong setting.
        KeyboardInterrupt: on Ctrl-C before any plan was found.
    """
    check_settings(time_limit_s, GAP_LIMIT, seed, workers)
    require_without(
        plan.job, "replan", ("shard_optimizer", "shard_parameters", "offload", "lengths")
    )
    _require_slack(slack)
    _require_stages(plan)
    machines = new_machines(plan, _changes(cluster, lost, slow, added))
    state = State(plan.on_groups, machines.survivors)
    task = SearchTask(machines.problem, Settings(seed, workers, deterministic), GAP_LIMIT)
    search = Search(task, Clock(time_limit_s, deterministic), progress)
    run_until_stopped(search, (_repairs(plan, machines, state), *STEPS_AFTER))
    limit = limit_text(time_limit_s, deterministic)
    return _replanned(search, plan, machines, state, slack, limit)


def _changes(
    cluster: Cluster | None,
    lost: Sequence[str],
    slow: Mapping[str, float] | Sequence[SlowedDevice],
    added: Sequence[str | Path | Twin],
) -> MachineChanges:
    """Return the changes of the machines, those given as text parsed."""
    came = tuple(x if isinstance(x, Twin) else parse_added(x) for x in added)
    return MachineChanges(cluster, tuple(lost), came, _slow(slow))


def _replanned(
    search: Search, plan: Plan, machines: NewMachines, state: State, slack: float, limit: str
) -> Replanned:
    """Return the choice among the plans of a search that is over."""
    best_of(search)
    found = choose(search, state, slack)
    made = _plan(search, plan, machines, found[0], limit)
    return Replanned(
        plan=made,
        moves=moves_between(plan, made, state),
        alternatives=found,
        slack=slack,
        old_iteration_time_s=plan.predicted.iteration_time_s,
        ended=ended_by(search),
        search_s=search.clock.elapsed_s,
        notes=tuple(_lone(made)),
    )


def _repairs(plan: Plan, machines: NewMachines, state: State) -> SearchStep:
    """Return the step that comes first: all later steps start from the repaired plans."""

    def run(search: Search, time: TimeSlice) -> None:
        repair(search, plan.on_groups, machines, state, time)

    return SearchStep("repairs of the old plan", run, TimeShare(0.7, "whole"))


def _slow(slow: Mapping[str, float] | Sequence[SlowedDevice]) -> tuple[SlowedDevice, ...]:
    if not isinstance(slow, Mapping):
        return tuple(slow)
    return tuple(parse_slow(f"{name}:{float(factor)!r}") for name, factor in slow.items())


def _require_slack(slack: float) -> None:
    if not 0 <= slack < float("inf"):
        raise PipeplanError(
            f"slack: {slack} is not a share of at least 0; write 0.05 for 5 % slower than the "
            "fastest plan found"
        )


def _require_stages(plan: Plan) -> None:
    """Check that the plan is of its model, and that its pipelines train in step."""
    problems = list(stage_problems(plan.on_groups))
    if problems:
        raise PipeplanError(f"plan: {problem}" for problem in problems)
    options_of(plan.sync)
    if plan.sync.strategy not in SYNCHRONOUS:
        raise PipeplanError(
            f"sync.strategy: {plan.sync.strategy!r} works between pipelines, which go on by "
            "themselves when a worker is lost; plan anew with `pipeplan plan --sync "
            f"{plan.sync.strategy} --warm-start PLAN` on the new cluster"
        )


def _plan(
    search: Search, old: Plan, machines: NewMachines, choice: Alternative, limit: str
) -> Plan:
    """Return the verified plan of the choice, with the old plan's synchronisation."""
    solver = f"replanned, schedule by {choice.schedule.method}"
    verified = made = plan_of(search, choice.schedule, limit, solver)
    if made.sync != old.sync:
        made = with_strategy(made, old.sync)
    if machines.parallel is not None:
        made = made.of_problem(machines.single, machines.parallel)
    if made is not verified:
        require_valid(made)
    return made


def _lone(made: Plan) -> Iterator[str]:
    devices = unjoined_devices(made)
    if devices:
        yield (
            f"no path of links and switches joins {compress_devices(devices)} to a device in use; "
            "if they came anew, their links may be missing in what was added"
        )
