"""The parameters that a rank shares with others, and the optimisation of all it holds."""

from __future__ import annotations

from functools import partial
from typing import Any

from executor.launch.prepare import Prepared
from executor.sync.divided_layers import DividedLayer
from executor.sync.gradients import SharedGradients, buckets_of
from executor.sync.shared_parameters import (
    ParameterOwners,
    divided_parameters,
    shared_parameters,
)
from executor.training.master_weights import MakeOptimizer
from executor.training.optimisation import Optimisation
from executor.training.optimizer import job_optimizer
from executor.training.state_shards import StateShards
from planner.plan.programs import Reduce
from planner.sync.strategies import AllReduceOptions, options_of


def optimisation_of(
    prepared: Prepared, make_optimizer: MakeOptimizer | None = None, **settings: Any
) -> Optimisation:
    """Return the optimisation of this rank's parameters.

    Args:
        prepared: what this rank runs.
        make_optimizer: makes the optimizer of parameters by name; default the job's.
        **settings: see :class:`Optimisation`.
    """
    plan, rank = prepared.plan, prepared.place.rank
    owners, shards = ParameterOwners.of_plan(plan), None
    counted = owners.first_held(rank)
    if plan.job.shards_state:
        options = options_of(plan.sync)
        assert isinstance(options, AllReduceOptions)
        buckets = buckets_of(shared_gradients(prepared), options.bucket_mib)
        shards = StateShards(buckets, rank, _divided_layers(prepared))
        # Each element is in a slice of one rank; of what members of a group have whole, one counts.
        is_first = plan.place_of(rank).member == 0
        whole = [n for n in shards.shared if is_first or owners.is_split(n)]
        counted = counted - shards.shared | frozenset(whole)
    make = make_optimizer or partial(job_optimizer, plan.job)
    return Optimisation(
        prepared.parameters, counted, make, device=prepared.device, shards=shards, **settings
    )


def shared_gradients(prepared: Prepared) -> list[SharedGradients]:
    """Return what a rank shares with others, in the order in which they reduce it."""
    names = {row.reduce: row.names for row in shared_parameters(prepared.plan)}
    return [
        SharedGradients(action, {name: prepared.parameters[name] for name in names[action]})
        for action in prepared.program
        if isinstance(action, Reduce)
    ]


def _divided_layers(prepared: Prepared) -> list[DividedLayer]:
    """Return the layers of a rank whose weights its replicas divide; whole until training begins.

    Raises:
        PipeplanError: if one has weights of several types.
    """
    rank, parameters = prepared.place.rank, prepared.parameters
    return [
        DividedLayer(
            str(row.layer),
            {name: parameters[name] for name in row.names},
            row.reduce,
            rank,
        )
        for row in divided_parameters(prepared.plan)
        if rank in row.ranks
    ]
