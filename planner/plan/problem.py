"""The planning problem: one model, one cluster, one job."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from planner.cluster.cluster import Cluster
from planner.errors import PipeplanError, near, require_kind
from planner.job import Job, JsonValue
from planner.model.layer_graph import LayerGraph, require_samples
from planner.plan.kept_rules import missing_price, unknown_devices, unknown_layers
from planner.plan.runtime_rules import PIPEPLAN, RuntimeRules
from planner.records.document import digest_of_data
from planner.space import Space

JOB_FIELDS_WITHOUT_COST = set(
    "name learning_rate epoch_samples loss model_arguments inputs runtime lengths "
    "recompute_attention".split()
)
"""Job fields that do not change a traced model's costs; a bound still holds after an edit of these.
The lengths of microbatches and their shares are in the graph, and so is recomputed attention."""
_CLUSTER_FIELDS_WITHOUT_COST: dict[str, Any] = {
    "currency": True,
    "device_types": {"__all__": {"source", "price_per_hour"}},
    "devices": {"__all__": {"price_per_hour"}},
}
"""Fields left out of the digest: prices do not change a plan's time, and plans from before device
types had a source keep their digest."""


@dataclass(frozen=True)
class ModelSource:
    """The origin of a model: ``module:factory`` or ``hf:NAME``, and its keyword arguments."""

    factory: str | None = None
    arguments: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """The input of ``solve``.

    Attributes:
        graph: the traced model.
        cluster: devices and links.
        job: microbatches, precision, optimizer.
        source: how the executor can build the model again; optional for studies.
        runtime: how plans will be run; :func:`planner.plan.runtimes.for_runtime` sets the rules of
            the job's runtime.
        copies: equal pipelines of which this is one, whose replicas share what the job has them
            share; for a search of one of them alone.
        least_pipelines: the least number of pipelines, where the job asks for equal ones.

    Raises:
        PipeplanError: if the three do not fit together.
    """

    graph: LayerGraph
    cluster: Cluster
    job: Job = field(default_factory=Job)
    source: ModelSource = field(default_factory=ModelSource)
    runtime: RuntimeRules = PIPEPLAN
    copies: int = 1
    least_pipelines: int = 1

    def __post_init__(self) -> None:
        require_kind(self.graph, LayerGraph, "Problem: graph", "LayerGraph.load reads a file")
        require_kind(self.cluster, Cluster, "Problem: cluster", "Cluster.load reads a file")
        require_kind(self.job, Job, "Problem: job", "Job.load reads a file")
        require_kind(self.source, ModelSource, "Problem: source", 'write ModelSource("m:factory")')
        require_samples(self.graph, self.job.samples_per_microbatch)
        if self.graph.record.precision != self.job.precision:
            raise PipeplanError(
                f"layer graph {self.graph.name!r} was traced in {self.graph.record.precision}, "
                f"the job says precision = {self.job.precision!r}; trace it again"
            )
        _require_known_cuts(self.graph, self.job)
        _require_lengths(self.graph, self.job)
        _require_attention(self.graph, self.job)
        wrong = [
            *unknown_layers(self.job.rules, self.graph.layers),
            *missing_price(self.job.rules, self.cluster),
        ]
        if wrong:
            raise PipeplanError(wrong)
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
            measured = all(name in layer.measured for layer in self.graph.on(name).record.layers)
            if not measured and self.job.precision not in kind.precisions:
                known = ", ".join(kind.precisions)
                raise PipeplanError(
                    f"device type {name!r} has no peak_tflop_per_s for precision "
                    f"{self.job.precision!r} (it has {known}); choose one of these in the job or "
                    f"add peak_tflop_per_s.{self.job.precision} to the cluster file"
                )

    def require_known_devices(self) -> None:
        """Refuse rules that name a device or a node which the cluster does not have.

        Problems of some devices of a cluster keep the rules of all, so that whoever brings a whole
        problem asks for this.

        Raises:
            PipeplanError: naming each.
        """
        of_groups = self.job.tensor_parallel != 1
        wrong = [*unknown_devices(self.job.rules, self.cluster, of_groups=of_groups)]
        if wrong:
            raise PipeplanError(wrong)

    def graph_on(self, devices: Sequence[str]) -> LayerGraph:
        """Return the graph with the figures of devices that hold a stage, which are alike there."""
        return self.graph.on(self.cluster.type_of(devices[0]))

    @property
    def has_groups(self) -> bool:
        """Whether its devices are tensor-parallel groups of devices."""
        return any(kind.group is not None for kind in self.cluster.device_types.values())

    @cached_property
    def divided_parameters(self) -> frozenset[str]:
        """Names of the parameters that the replicas of a stage divide, if it has several."""
        rows = self.graph.own_parameters.values() if self.job.shards_parameters else ()
        return frozenset(parameter.name for row in rows for parameter in row)

    @property
    def digest(self) -> str:
        """SHA-256 of everything a bound on the job's space depends on."""
        return self.digest_in(self.job.space)

    def digest_in(self, space: Space) -> str:
        """Return the SHA-256 of what a bound on a space depends on.

        This is the layer graph, the cluster, the job's costs, the freedoms of the space and the
        rules of the runtime, where they are not those of Pipeplan's own.
        """
        return digest_of_data(
            {
                "graph": self.graph.digest,
                "cluster": _costs_of(self.cluster),
                "job": _job_data(self.job.model_copy(update=dict(space))),
                **_rules_of(self.runtime),
            }
        )

    def digests_in(self, space: Space) -> tuple[str, ...]:
        """Return the digests with which a bound on a space holds for this problem.

        In no runtime may anything begin earlier or take less memory than in Pipeplan's own, so what
        was proved for Pipeplan's own holds for all, unless some of what they send may be less.
        """
        own = replace(self, runtime=self.runtime if self.runtime.may_be_faster else PIPEPLAN)
        return tuple(dict.fromkeys((self.digest_in(space), own.digest_in(space))))


def _require_known_cuts(graph: LayerGraph, job: Job) -> None:
    unknown = [name for name in job.cuts or () if name not in graph.layers]
    if unknown:
        raise PipeplanError(
            f"job.cuts: the model has no layer {name!r}; {near(name, graph.layers)}"
            for name in unknown
        )


def _require_lengths(graph: LayerGraph, job: Job) -> None:
    """Refuse lengths that the graph was not traced with, and what they cannot be combined with."""
    traced, lengths = graph.record.lengths, job.lengths
    wanted = () if lengths is None else tuple(zip(lengths.tokens, lengths.all_shares, strict=True))
    if not _are_close(traced, wanted):
        raise PipeplanError(
            f"job.lengths: microbatches of {_in_words(wanted)}, but layer graph {graph.name!r} was "
            f"traced for {_in_words(traced)}; trace it again with this job"
        )
    if lengths is None:
        return
    if job.tensor_parallel != 1:
        raise PipeplanError(
            f"tensor_parallel = {job.tensor_parallel}: microbatches of several lengths are planned "
            "for single devices only so far; set it to 1, or remove lengths from the job"
        )
    if job.shard_parameters:
        raise PipeplanError(
            f"shard_parameters = {json.dumps(job.shard_parameters)}: microbatches of several "
            "lengths are planned with whole weights on every replica only so far; set it to "
            "false, or remove lengths from the job"
        )
    if job.offload:
        raise PipeplanError(
            f"offload = {json.dumps(job.offload)}: microbatches of several lengths are planned "
            "with stashes that stay on their devices only so far; set it to false, or remove "
            "lengths from the job"
        )


def _require_attention(graph: LayerGraph, job: Job) -> None:
    """Refuse a graph that says otherwise than the job whether attention is recomputed."""
    wanted, traced = job.recompute_attention, graph.record.recomputes_attention
    if wanted != traced:
        raise PipeplanError(
            f"job.recompute_attention: {json.dumps(wanted)}, but layer graph {graph.name!r} was "
            f"traced with {json.dumps(traced)}; trace it again with this job"
        )
    measured = [row.name for row in graph.record.layers if row.measured]
    if wanted and measured:
        raise PipeplanError(
            f"job.recompute_attention: true, but layer {measured[0]!r} was measured whole, without "
            "its attention running again; leave --costs out, or set it to false"
        )


def _in_words(lengths: Sequence[tuple[int, float]]) -> str:
    rows = ", ".join(f"{tokens} tokens ({share:.4g})" for tokens, share in lengths)
    return rows or "one length"


def _are_close(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    return len(one) == len(other) and all(
        here[0] == there[0] and abs(here[1] - there[1]) <= _SHARE_TOLERANCE
        for here, there in zip(one, other, strict=True)
    )


_SHARE_TOLERANCE = 1e-9


def cluster_digest(cluster: Cluster) -> str:
    """Return the SHA-256 of everything a plan's time depends on, without prices and sources."""
    return digest_of_data(_costs_of(cluster))


def _job_data(job: Job) -> dict[str, Any]:
    """Return the fields of a job that a bound depends on.

    A freedom that older versions did not have is left out where it is not used, so that their
    plans keep their digest.
    """
    data = job.model_dump(mode="json", exclude=JOB_FIELDS_WITHOUT_COST)
    for name, older in _OLDER_FREEDOMS.items():
        if data[name] == older:
            del data[name]
    return data


_OLDER_FREEDOMS = {
    "backward": "whole",
    "overlap_reduction": False,
    "min_stages": 1,
    "cuts": None,
    "placement": "any",
    "order": "any",
    "equal_pipelines": False,
    "tensor_parallel": 1,
    "sequence_parallel": False,
    "shard_optimizer": False,
    "shard_parameters": False,
    "offload": False,
}
"""Freedoms that older versions did not have, with their values there."""


def _rules_of(runtime: RuntimeRules) -> dict[str, Any]:
    """Return how a runtime runs plans, of which Pipeplan's own has no more than its links."""
    rules = runtime.model_dump(mode="json", include={"behaviour", "interleaved"})
    own = PIPEPLAN.model_dump(mode="json", include={"behaviour", "interleaved"})
    found: dict[str, Any] = {} if rules == own else {"runtime": rules}
    for name in ("group_messages", "tied"):
        if getattr(runtime, name) != getattr(PIPEPLAN, name):
            found[name] = getattr(runtime, name)
    return {**found, "links": runtime.links}


def _costs_of(cluster: Cluster) -> dict[str, Any]:
    return cluster.model_dump(mode="json", exclude=_CLUSTER_FIELDS_WITHOUT_COST)
