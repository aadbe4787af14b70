"""Names as people read them, shared by the charts and the tables."""

from planner.artifacts.names import compress_devices, stages_label
from planner.simulator import Timeline
from planner.units import plural

__all__ = ["compress_devices", "problem_title", "stages_label"]


def problem_title(timeline: Timeline) -> str:
    """The model, the cluster and the size of the pipeline, on one line."""
    pipeline = timeline.pipeline
    parts = (
        plural(len(pipeline.stages), "stage"),
        plural(len(pipeline.devices), "device"),
        plural(pipeline.microbatches, "microbatch", "es"),
    )
    return f"{pipeline.problem.graph.name} on {pipeline.problem.cluster.name}: {', '.join(parts)}"
