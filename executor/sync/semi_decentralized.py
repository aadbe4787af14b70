"""Semi-decentralised synchronisation: at each place, whoever is ready averages.

SDPipe (Miao et al., VLDB 2023). How groups form: see :mod:`planner.sync.groups.readiness`.
"""

from __future__ import annotations

from executor.sync.average_behind import AverageBehind
from executor.sync.group_average import GroupAverage


class SemiDecentralized(GroupAverage):
    """Averages over groups of those who are ready, at each place of the pipelines by itself."""


class SemiDecentralizedBehind(AverageBehind):
    """The same behind the next iteration's computation; the paper's pipelines wait instead."""
