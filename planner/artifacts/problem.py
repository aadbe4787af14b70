"""The problem: one model, one cluster, one job."""

from dataclasses import dataclass, field
from typing import Any

from planner.artifacts.cluster import Cluster
from planner.artifacts.document import digest_of_data
from planner.artifacts.job import Job, JsonValue
from planner.artifacts.layer_graph import LayerGraph, require_samples
from planner.errors import PipeplanError

JOB_FIELDS_WITHOUT_COST = {"name", "learning_rate", "loss", "model_arguments", "inputs"}
"""What a traced model's costs do not depend on; an edit of these leaves a bound proved."""
_CLUSTER_FIELDS_WITHOUT_COST: dict[str, Any] = {
    "currency": True,
    "device_types": {"__all__": {"source", "price_per_hour"}},
    "devices": {"__all__": {"price_per_hour"}},
}
"""Plans made before device types told their source keep the digest they were made with; a plan is
as fast whatever it costs."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: ``module:factory`` or ``hf:NAME``, and its keyword arguments."""

    factory: str | None = None
    arguments: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """Everything ``solve`` needs.

    Attributes:
        graph: the traced model.
        cluster: devices and links.
        job: microbatches, precision, optimizer.
        source: how the executor can build the model again; optional for studies.

    Raises:
        PipeplanError: if the three do not fit together.
    """

    graph: LayerGraph
    cluster: Cluster
    job: Job = field(default_factory=Job)
    source: ModelSource = field(default_factory=ModelSource)

    def __post_init__(self) -> None:
        require_samples(self.graph, self.job.samples_per_microbatch)
        if self.graph.record.precision != self.job.precision:
            raise PipeplanError(
                f"layer graph {self.graph.name!r} was traced in {self.graph.record.precision}, "
                f"the job says precision = {self.job.precision!r}; trace it again"
            )
        types = {device.type for device in self.cluster.devices}
        homeless = [
            layer for layer in self.graph.record.layers if not any(map(layer.may_run_on, types))
        ]
        if homeless:
            raise PipeplanError(
                f"layer {layer.name!r} runs on device types {', '.join(layer.device_types)} only, "
                f"the cluster has {', '.join(sorted(types))}; add such a device or change the "
                "layer's device_types"
                for layer in homeless
            )
        for name in sorted(types):
            kind = self.cluster.device_types[name]
            measured = all(name in layer.measured for layer in self.graph.record.layers)
            if not measured and self.job.precision not in kind.precisions:
                known = ", ".join(kind.precisions)
                raise PipeplanError(
                    f"device type {name!r} has no peak_tflop_per_s for precision "
                    f"{self.job.precision!r} (it has {known}); choose one of these in the job or "
                    f"add peak_tflop_per_s.{self.job.precision} to the cluster file"
                )

    @property
    def digest(self) -> str:
        """SHA-256 of all that a bound is proved for: layer graph, cluster and the job's costs."""
        return digest_of_data(
            {
                "graph": self.graph.digest,
                "cluster": _costs_of(self.cluster),
                "job": self.job.model_dump(mode="json", exclude=JOB_FIELDS_WITHOUT_COST),
            }
        )


def cluster_digest(cluster: Cluster) -> str:
    """SHA-256 of all that a plan's time depends on: prices and names of sources are left out."""
    return digest_of_data(_costs_of(cluster))


def _costs_of(cluster: Cluster) -> dict[str, Any]:
    return cluster.model_dump(mode="json", exclude=_CLUSTER_FIELDS_WITHOUT_COST)
