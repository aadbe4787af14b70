"""A plan in tables and lines: its stages, devices, throughput and time provenance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage
from planner.costs.throughput import SECONDS_AN_HOUR, Throughput, throughput
from planner.model.split_record import most_loaded
from planner.plan.operations import KIND_LABELS, compress_devices, stages_label
from planner.plan.plan import TimeProvenance, gap
from planner.report.tables import Table, View, common_prefix
from planner.simulation.critical_path import PathStep
from planner.simulation.time_provenance import path_time_provenance, time_provenance
from planner.units import format_bytes, format_seconds, four_digits, plural

if TYPE_CHECKING:
    from planner.plan.plan import Plan
    from planner.plan.runtime_rules import RuntimeRules
    from planner.plan.tensor_parallel import TensorParallel
    from planner.simulation.noise import Noise, NoisyTimes
    from planner.simulation.timeline import Timeline

MOST_OVERFLOWS = 3
"""Most devices named that exceed their memory; the rest is counted."""


def space_lines(plan: Plan) -> list[str]:
    """Return the space that a plan was searched in, and the plans that its bound covers."""
    covers, runtime = plan.provenance.bound_covers, plan.job.runtime
    of = "" if runtime is None else f" of {runtime}"
    bound = str(covers)
    if covers.space == plan.job.space:
        own = " that keeps the constraints of one's own" if covers.own_constraints else ""
        bound = f"every plan of this space{own}"
        if not plan.job.rules.is_empty:
            bound += ", also for those that the job's rules leave out"
    wider = () if covers.space is None else covers.space.not_proved_with
    if wider:
        bound += f"; its proof allows {', '.join(wider)} too"
    return [f"space{of}: {plan.job.space}", f"the bound holds for {bound}"]


def time_provenance_lines(shares: TimeProvenance | None) -> list[str]:
    """Return the time provenance as a line; empty if the iteration takes no time."""
    if shares is None:
        return []
    return [
        f"time provenance: {shares.measured:.1%} of the iteration time comes from measured "
        f"figures, {shares.datasheet:.1%} from datasheets, {shares.assumed:.1%} from assumptions"
    ]


def time_provenance_data(
    pipeline: PlacedPipeline, path: Sequence[PathStep]
) -> dict[str, float] | None:
    """Return the time provenance of a critical path as plain JSON values."""
    shares = path_time_provenance(pipeline, path)
    return None if shares is None else shares.model_dump()


def overflow_line(devices: Sequence[tuple[str, int, int]]) -> str:
    """Return a line about devices that exceed their memory: name, peak and capacity in bytes."""
    texts = [
        f"{name} reaches {format_bytes(peak)} of {format_bytes(capacity)}"
        for name, peak, capacity in devices[:MOST_OVERFLOWS]
    ]
    more = len(devices) - len(texts)
    named = ", ".join([*texts, *([plural(more, "other")] if more else [])])
    return f"the plan exceeds memory: {named}; `pipeplan verify` refuses it"


def overflow_lines(plan: Plan) -> list[str]:
    """Return a line on the devices of which a plan needs more memory than they have, if any."""
    cluster = plan.on_groups.cluster
    rows = [
        (device, row.peak_memory_bytes, cluster.device_type(device).capacity_bytes)
        for device, row in plan.predicted.devices.items()
    ]
    over = [row for row in rows if row[1] > row[2]]
    return [overflow_line(over)] if over else []


def plan_view(plan: Plan, timeline: Timeline) -> View:
    """Return a plan's stages, devices and figures.

    Args:
        plan: gives the proven bound, and what each stage recomputes.
        timeline: a simulation of the plan; all other figures are its.

    Returns:
        The table of stages (milliseconds and bytes of one microbatch), the table of devices
        (milliseconds of one iteration), lines on what the time rests on, the line of figures.
    """
    return [
        stage_table(plan, timeline),
        device_table(timeline),
        *time_provenance_lines(time_provenance(timeline)),
        *throughput_lines(plan, timeline.iteration_time_s),
        *length_lines(plan),
        *group_lines(plan),
        *shared_state_lines(plan),
        figures_line(timeline, plan.predicted.lower_bound_s),
    ]


def length_lines(plan: Plan) -> list[str]:
    """Return the times of microbatches of several lengths, and what the figures are of."""
    times, lengths = plan.predicted.lengths, plan.job.lengths
    if times is None or lengths is None:
        return []
    order = "drawn" if lengths.order == "any" else lengths.order.replace("_", " ")
    return [
        f"lengths: expected {format_seconds(times.expected_s)}, 95th percentile "
        f"{format_seconds(times.percentile_95_s)}, worst {format_seconds(times.worst_s)} of "
        f"{plural(times.iterations, 'iteration')} with microbatches of {lengths}, in the order "
        f"{order}",
        "all other figures, and the bound, are of the mean iteration: every microbatch takes the "
        "mean time and holds what the longest does",
    ]


def group_lines(plan: Plan) -> list[str]:
    """Return a line on what the devices of a plan are, if they are tensor-parallel groups."""
    parallel = plan.tensor_parallel
    if parallel is None:
        return []
    shared = ", which share values between split parts by positions" if parallel.sequence else ""
    if len(parallel.degrees) == 1:
        count = parallel.degrees[0]
        line = f"each device above is a tensor-parallel group of {count} devices{shared}"
    else:
        used = {name for stage in plan.stages for name in stage.devices}
        sizes: dict[int, list[str]] = {}
        for group in parallel.groups:
            if group.name in used:
                sizes.setdefault(len(group.devices), []).append(group.name)
        rows = (f"{', '.join(names)} of {plural(size, 'device')}" for size, names in sizes.items())
        line = f"the devices above are tensor-parallel groups: {'; '.join(rows)}"
    return [line, *_expert_lines(plan, parallel)]


def _expert_lines(plan: Plan, parallel: TensorParallel) -> Iterator[str]:
    """Yield a line on the experts of a group's devices, if they have whole ones."""
    sizes = {len(group.devices) for group in parallel.groups}
    for split in plan.model.graph.splits:
        if split.experts and split.degree in sizes and split.sequence == parallel.sequence:
            most = [most_loaded(load, split.degree) for load in split.expert_load]
            told = (
                f"; the one with the most tokens has up to {float(max(most)):.2f} times the mean"
                if most
                else ", which get equally many tokens"
            )
            yield f"its devices have whole experts{told}"


def shared_state_lines(plan: Plan) -> list[str]:
    """Return a line on where replicas share the optimizer's state, if the job has them do so."""
    if not plan.job.shards_state:
        return []
    alone = [stage.index for stage in plan.stages if len(stage.devices) == 1]
    if len(alone) == len(plan.stages):
        return ["no stage has replicas: each device keeps its own optimizer state whole"]
    shared = [stage.index for stage in plan.stages if len(stage.devices) > 1]
    does = "share the optimizer's state"
    if plan.job.shards_parameters:
        does = "divide weights, gradients and optimizer state"
    line = f"replicas of {stages_label(shared)} {does}"
    return [f"{line}; {stages_label(alone)}: one device keeps its own" if alone else line]


def throughput_lines(plan: Plan, iteration_time_s: float) -> list[str]:
    """Return throughput, MFU and cost as a line; empty if the iteration takes no time."""
    found = _throughput(plan, iteration_time_s)
    if found is None:
        return []
    parts = [f"{four_digits(found.samples_per_s)} samples/s"]
    if found.tokens_per_s is not None:
        parts.append(f"{four_digits(found.tokens_per_s)} tokens/s")
    if found.mfu is not None:
        parts.append(f"MFU {found.mfu:.1%}")
    if found.cost_per_million_samples is not None:
        unit = cost_heading(plan.cluster.currency)
        parts.append(f"{four_digits(found.cost_per_million_samples)} {unit}")
    if found.epoch_s is not None:
        parts.append(f"epoch {format_epoch(found.epoch_s)}")
    if found.cost_per_epoch is not None:
        unit = cost_heading(plan.cluster.currency, "epoch")
        parts.append(f"{four_digits(found.cost_per_epoch)} {unit}")
    return [", ".join(parts)]


def format_epoch(epoch_s: float) -> str:
    """Format the time of an epoch, in hours from one on."""
    if epoch_s < SECONDS_AN_HOUR:
        return format_seconds(epoch_s)
    return f"{four_digits(epoch_s / SECONDS_AN_HOUR)} h"


def throughput_data(plan: Plan) -> dict[str, Any] | None:
    """Return a plan's throughput, MFU and cost as plain data; null where one is not known."""
    found = _throughput(plan, plan.predicted.iteration_time_s)
    return None if found is None else {**asdict(found), "currency": plan.cluster.currency}


def _throughput(plan: Plan, iteration_time_s: float) -> Throughput | None:
    graph, devices = plan.model.graph, plan.rank_devices
    return throughput(graph, plan.cluster, plan.job, devices, iteration_time_s)


def cost_heading(currency: str | None, of: str = "million samples") -> str:
    """Return the heading of a column or an axis of costs."""
    return f"{currency or 'cost'} per {of}"


def figures_line(timeline: Timeline, lower_bound_s: float) -> str:
    """Return iteration time, lower bound, gap and bubble on one line.

    Args:
        timeline: of the plan.
        lower_bound_s: in seconds; 0 where none was proved.
    """
    share = gap(timeline.iteration_time_s, lower_bound_s)
    proved = (
        "no lower bound"
        if share is None
        else f"lower bound {format_seconds(lower_bound_s)}, gap {share:.2%}"
    )
    time = format_seconds(timeline.iteration_time_s)
    return f"iteration {time}, {proved}, bubble {timeline.bubble:.1%}"


def runtime_lines(rules: RuntimeRules) -> Iterator[str]:
    """Yield what a plan's time leaves out of its runtime: unknown host times."""
    if rules.lacks_host_times:
        yield (
            f"host times of {rules.name} per operation and message are unknown, 0 is used; "
            "measured ones go into a runtime file (computation_us, message_us, "
            "message_copy_gb_per_s)"
        )


def noise_table(noise: Noise, times: NoisyTimes) -> Table:
    """Return iteration times under noise, each relative to the one predicted without.

    Args:
        noise: says how durations vary.
        times: under it.
    """
    figures = {
        "expected": times.expected_s,
        "median": times.median_s,
        "95th percentile": times.percentile_95_s,
        f"worst of {times.samples:,}": times.worst_s,
    }
    predicted_s = times.predicted_s
    cells = [
        format_seconds(time_s) + (f" ({time_s / predicted_s - 1:+.1%})" if predicted_s > 0 else "")
        for time_s in figures.values()
    ]
    title, headings = f"Iteration time under noise: {noise}", ("predicted", *figures)
    return Table.of(title, (), headings, [(format_seconds(predicted_s), *cells)])


def stage_table(plan: Plan, timeline: Timeline) -> Table:
    """Return a row for each stage: times and bytes of one microbatch; columns that are in use."""
    ran = {(o.stage, o.kind) for order in plan.parsed_orders().values() for o in order}
    kinds = [kind for kind in KIND_LABELS if any(kind == its for _, its in ran)]
    offloads = any(stage.offload for stage in plan.stages)
    stages = timeline.pipeline.stages
    prefix = common_prefix(name for stage in stages for name in stage.spec.layers)

    def cells(index: int, stage: PlacedStage) -> Iterator[str]:
        yield from (str(index), compress_devices(stage.spec.devices), _layers(stage, prefix))
        for kind in kinds:
            seconds = [times.seconds(kind) for times in stage.times.values()]
            yield _milliseconds(seconds) if (index, kind) in ran else "-"
        bytes_ = [stage.stash_bytes, stage.static_bytes]
        yield from map(format_bytes, bytes_ + ([stage.offload_bytes] if offloads else []))

    return Table.of(
        "Stages, for one microbatch",
        ["stage", "devices", f"layers of {prefix[:-1]}" if prefix else "layers"],
        [
            *(f"{KIND_LABELS[kind]} ms" for kind in kinds),
            *("stash", "weights and optimizer", *(["offloaded"] if offloads else [])),
        ],
        (cells(index, stage) for index, stage in enumerate(stages)),
    )


def _layers(stage: PlacedStage, prefix: str) -> str:
    """Return the first and the last layer, and how many there are, recomputed and offloaded."""
    spec = stage.spec
    ends = dict.fromkeys(spec.layers[place].removeprefix(prefix) for place in (0, -1))
    counts = [f"{len(spec.layers):,}"] if len(spec.layers) > 1 else []
    counts += [f"{len(spec.recompute):,} recomputed"] if spec.recompute else []
    counts += [f"{len(spec.offload):,} offloaded"] if spec.offload else []
    return " … ".join(ends) + (f" ({', '.join(counts)})" if counts else "")


def device_table(timeline: Timeline) -> Table:
    """Return a row for each device: its times and its memory in one iteration."""
    pipeline, time_s = timeline.pipeline, timeline.iteration_time_s

    def cells(device: str) -> Iterator[str]:
        busy_s, peak = timeline.busy_s[device], timeline.peak_memory_bytes[device]
        capacity = pipeline.capacity_bytes(device)
        stages = compress_devices(map(str, pipeline.stages_on[device]))
        yield from (device, pipeline.problem.cluster.type_of(device), stages)
        yield _milliseconds([busy_s])
        yield f"{max(0.0, 1 - busy_s / time_s) if time_s > 0 else 0.0:.1%}"
        yield f"{format_bytes(peak)} of {format_bytes(capacity)} ({peak / capacity:.0%})"

    return Table.of(
        "Devices, for one iteration",
        ("device", "type", "stages"),
        ("busy ms", "idle", "peak memory"),
        map(cells, pipeline.stages_on),
    )


def _milliseconds(seconds: Sequence[float]) -> str:
    """Return one figure, or the range over devices of several types."""
    first, last = f"{min(seconds) * 1e3:.2f}", f"{max(seconds) * 1e3:.2f}"
    return first if first == last else f"{first} … {last}"
