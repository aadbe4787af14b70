"""Proves lower bounds and emits their certificates, which planner/verification checks.

:func:`prove` yields improving bounds on all plans of a problem's space, :func:`list_partitions`
lists the partitions of a small cluster that may have a plan below a time. Nothing here is taken
from the checker or from a search, and neither the checker nor what is below it imports this.
"""

from planner.bounds.named import BoundedStage
from planner.bounds.partitions import BoundedPartition, PartitionList, list_partitions
from planner.bounds.proving import ProvedBound, Prover, prove

__all__ = [
    "BoundedPartition",
    "BoundedStage",
    "PartitionList",
    "ProvedBound",
    "Prover",
    "list_partitions",
    "prove",
]
