"""The strategies between pipelines, by name."""

from __future__ import annotations

from executor.exchange.neighbours import Neighbours
from executor.sync.ad_psgd import AdPsgd
from executor.sync.eager_parameter_server import EagerParameterServer, modulation
from executor.sync.group_average import GroupAverage
from executor.sync.parameter_server import ParameterServer
from executor.sync.partial_all_reduce import PartialAllReduce
from executor.sync.protocol import Between
from executor.sync.semi_decentralized import SemiDecentralized, SemiDecentralizedBehind
from planner.sync.strategies import (
    AdPsgdOptions,
    EagerParameterServerOptions,
    Options,
    ParameterServerOptions,
    PartialAllReduceOptions,
    SemiDecentralizedOptions,
)


def between_of(options: Options, neighbours: Neighbours, seed: int) -> Between:
    """The strategy that options are of.

    Args:
        options: of a strategy between pipelines.
        neighbours: at this rank's place.
        seed: of what it draws.
    """
    make = neighbours.optimisation.weights.make_optimizer
    match options:
        case ParameterServerOptions(mode=mode, servers=servers):
            return ParameterServer(neighbours, make, mode, servers or 1)
        case EagerParameterServerOptions(servers=servers):
            modulate = modulation(options.modulation, options.decay)
            return EagerParameterServer(neighbours, make, modulate, servers or 1)
        case AdPsgdOptions(pairs="bipartite"):
            return AdPsgd(neighbours, seed)
        case AdPsgdOptions():
            return GroupAverage(neighbours)
        case PartialAllReduceOptions():
            return PartialAllReduce(neighbours)
        case SemiDecentralizedOptions(overlap=True):
            return SemiDecentralizedBehind(neighbours)
        case SemiDecentralizedOptions():
            return SemiDecentralized(neighbours)
    raise AssertionError(f"{options!r} is no strategy between pipelines")
