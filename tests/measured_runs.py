"""Measurements of plans that never ran: a simulation, told as the executor tells a run."""

from collections.abc import Iterator, Sequence

from planner.measured.timeline import MeasuredTimeline
from planner.plan.operations import Operation
from planner.plan.plan import Plan
from planner.simulation.simulator import simulate_plan
from planner.simulation.timeline import Timeline, reduction_spans


def run_of(
    plan: Plan, steps: Sequence[Timeline] | None = None, *, emulated: bool = False
) -> MeasuredTimeline:
    """A run whose steps took these times; one step as predicted unless told."""
    steps = [simulate_plan(plan)] if steps is None else steps
    rows: dict[str, list] = {
        name: [] for name in ("steps", "operations", "transfers", "reductions", "optimizer_steps")
    }
    for step, timeline in enumerate(steps, 1):
        time_s = timeline.iteration_time_s
        peaks = timeline.peak_memory_bytes
        rows["steps"].append({"step": step, "iteration_time_s": time_s, "peak_memory_bytes": peaks})
        for name, events in _events(timeline).items():
            rows[name] += [{"step": step, **event} for event in events]
    devices = [
        {"name": name, "rank": rank, "hardware": "simulated"}
        for rank, name in enumerate(plan.ranks)
    ]
    return MeasuredTimeline.parse(
        {
            "plan_digest": plan.execution_digest,
            "model": plan.model.name,
            "cluster": plan.cluster.name,
            "emulated": emulated,
            "backend": "gloo",
            "devices": devices,
            **rows,
        },
        "run",
    )


def _events(timeline: Timeline) -> dict[str, list[dict]]:
    pipeline = timeline.pipeline
    ready = {}
    for event in timeline.operations:
        stage, kind, microbatch = event.operation
        ready[Operation(stage, "B" if kind == "I" else kind, microbatch)] = event.end_s

    def bytes_of(sent: Operation) -> int:
        stage = pipeline.stages[sent.stage]
        return stage.output_bytes if sent.kind == "F" else stage.input_gradient_bytes

    return {
        "operations": [
            {"device": e.device, "operation": str(e.operation), **_span(e.start_s, e.end_s)}
            for e in timeline.operations
        ],
        "transfers": [
            {
                "source": e.source,
                "target": e.target,
                "operation": str(e.operation),
                "bytes": bytes_of(e.operation),
                **_span(ready[e.operation], e.end_s),
            }
            for e in timeline.transfers
            if e.source != e.target
        ],
        "reductions": list(_reductions(timeline)),
        "optimizer_steps": [
            {"device": device, **_span(end_s - pipeline.optimizer_s[device], end_s)}
            for device, end_s in timeline.end_s.items()
        ],
    }


def _reductions(timeline: Timeline) -> Iterator[dict]:
    """One row a device for all buckets of a stage, as a rank records them."""
    spans, syncs = reduction_spans(timeline), timeline.pipeline.synchronisations
    for sync in {sync.stages: sync for sync in syncs}.values():
        row = {
            "stages": list(sync.stages),
            "bytes": sum(other.bytes for other in syncs if other.stages == sync.stages),
            **_span(*spans[sync.stages]),
        }
        yield from ({"device": device, **row} for device in sync.devices)


def _span(start_s: float, end_s: float) -> dict[str, float]:
    return {"start_s": max(0.0, start_s), "end_s": end_s}
