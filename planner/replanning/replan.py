"""``replan``: a plan for changed machines, near the one that training ran with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from planner.analysis.hardware import unjoined_devices
from planner.assembly import assemble_plan, version
from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError
from planner.plan.certificate import Proof
from planner.plan.moves import Moves
from planner.plan.operations import Orders, compress_devices, numbered_by_losses
from planner.plan.plan import COST_MODEL, Plan, Provenance
from planner.plan.runtimes import LOSSES_IN_ORDER
from planner.plan.unsupported import require_without
from planner.prediction import with_strategy
from planner.replanning.choice import Alternative, choose
from planner.replanning.search import Progress, ReplanSearch
from planner.replanning.state import State, moves_between
from planner.search.result import Ended
from planner.search.settings import check_settings
from planner.simulation.simulator import simulate
from planner.space import BoundCovers
from planner.sync.strategies import SYNCHRONOUS, options_of
from planner.variants.machine_changes import (
    NewMachines,
    new_machines,
)
from planner.verification import require_valid
from planner.verification.form import stage_problems

SLACK = 0.05
"""Share by which a plan may be slower than the fastest found if it moves fewer bytes."""
TIME_LIMIT_S = 1.0
"""Limit of the search; the command then takes about 2 s of a core for 64 GPUs, all in all."""


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
    slow: Mapping[str, float] = MappingProxyType({}),
    added: Sequence[str] = (),
    cluster: Cluster | None = None,
    slack: float = SLACK,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
    deterministic: bool = False,
    progress: Progress | None = None,
) -> Replanned:
    """Find a plan of the same training for the machines that are left or came.

    Model and job stay, so an iteration is the same samples and the same mathematics; of a plan of
    tensor-parallel groups their size stays too. Of the plans found that are at most ``slack``
    slower than the fastest found, that one is taken whose devices lack the fewest bytes.

    Args:
        plan: that training ran by.
        lost: devices that are gone, or nodes for all of their devices.
        slow: devices or nodes that take so many times as long for everything.
        added: ``NAME=LIKE`` for a device or node that came, with the type and links of another.
        cluster: all machines there are now, in place of ``lost`` and ``added``; a device of the
            plan, by name, holds what it held.
        slack: a share of at least 0.
        time_limit_s: of the search; seconds of counted work in deterministic mode. Making the first
            plan takes what it takes.
        seed: of random numbers.
        deterministic: the same plan on every machine.
        progress: called with every plan that is faster than all before.

    Raises:
        InfeasibleError: if no plan fits what is left; the message says which constraint binds.
        PipeplanError: naming an unknown device, a clash of names or a wrong setting.
        KeyboardInterrupt: on Ctrl-C before any plan was found.
    """
    check_settings(time_limit_s, 0.0, seed, 1)
    require_without(
        plan.job, "replan", ("shard_optimizer", "shard_parameters", "offload", "lengths")
    )
    _require_slack(slack)
    _require_stages(plan)
    machines = new_machines(plan, cluster=cluster, lost=lost, added=added, slow=slow)
    problem = machines.problem
    state = State(plan.on_groups, machines.survivors, problem.cluster.device_names)
    tell = progress or (lambda row: None)
    search = ReplanSearch(problem, state, time_limit_s, seed, deterministic, tell)
    search.run(plan.on_groups, machines)
    if not search.found:
        if search.is_interrupted:
            raise KeyboardInterrupt("before any plan was found")
        search.solve()
    return _replanned(search, plan, machines, slack)


def _replanned(search: ReplanSearch, plan: Plan, machines: NewMachines, slack: float) -> Replanned:
    """Return the choice among the plans of a search that is over."""
    found = choose(search.found, search.state, search.problem.cluster, slack)
    made = _plan(search, plan, machines, found[0])
    lone = compress_devices(unjoined_devices(made))
    return Replanned(
        plan=made,
        moves=moves_between(plan, made, search.state),
        alternatives=found,
        slack=slack,
        old_iteration_time_s=plan.predicted.iteration_time_s,
        ended=search.ended,
        search_s=search.elapsed_s,
        notes=(
            f"no path of links and switches joins {lone} to a device in use; if they came "
            "anew, their links may be missing in what was added",
        )
        if lone
        else (),
    )


def _require_slack(slack: float) -> None:
    if not 0 <= slack < float("inf"):
        raise PipeplanError(
            f"slack: {slack} is not a share of at least 0; write 0.05 for at most 5 % slower"
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


def _plan(search: ReplanSearch, old: Plan, machines: NewMachines, choice: Alternative) -> Plan:
    """Return the verified plan of the choice, with the old plan's synchronisation."""
    timeline, problem = choice.timeline, machines.problem
    orders: Orders = timeline.orders
    if problem.job.runtime in LOSSES_IN_ORDER:
        orders = numbered_by_losses(orders, len(timeline.pipeline.stages) - 1)
        timeline = simulate(timeline.pipeline, orders)
    proof = None
    if search.proved is not None:
        proof = Proof(certificate=search.proved.certificate(problem), unchecked=None)
    made = assemble_plan(timeline, orders, search.bound_s, _provenance(search), proof)
    if made.sync != old.sync:
        made = with_strategy(made, old.sync)
    if machines.parallel is not None:
        made = made.of_problem(machines.single, machines.parallel)
    require_valid(made)
    return made


def _provenance(search: ReplanSearch) -> Provenance:
    return Provenance(
        pipeplan=version("pipeplan"),
        ortools=version("ortools"),
        seed=search.seed,
        workers=1,
        limit=f"{'deterministic' if search.deterministic else 'wall'} {search.limit_s:g} s",
        solver="replanned",
        bound_covers=BoundCovers(space=search.problem.job.space, own_constraints=False),
        cost_model=COST_MODEL,
    )
