"""Partial all-reduce: groups by a static schedule or drawn by a generator.

Ripples (Luo et al. 2019), published as Prague (ASPLOS 2020). Which groups: see
:mod:`planner.sync.groups`.
"""

from __future__ import annotations

from executor.sync.group_average import GroupAverage


class PartialAllReduce(GroupAverage):
    """Averages over scheduled groups; the whole pipeline is in the same group at all its places."""
