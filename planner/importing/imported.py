"""What an importer hands out."""

from __future__ import annotations

from dataclasses import dataclass

from planner.artifacts.cluster import Cluster
from planner.artifacts.job import Job
from planner.artifacts.layer_graph import LayerGraph


@dataclass(frozen=True)
class Imported:
    """A file of another tool in Pipeplan's own artifacts.

    Attributes:
        graph: the layers.
        cluster: the devices the file speaks of; None if it speaks of none.
        job: what the file says of the job; the samples per microbatch are those of the profile.
        notes: what could not be read or had to be assumed, one line each, for the user.
    """

    graph: LayerGraph
    cluster: Cluster | None
    job: Job
    notes: tuple[str, ...]
