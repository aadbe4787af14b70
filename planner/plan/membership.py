"""Whether a plan lies in a space of plans, by the freedoms it uses."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple, Protocol

from planner.cluster.group_packing import packed
from planner.model.blocks import block_count, first_blocks
from planner.plan.operations import Operation, Orders, one_forward_one_backward, owners
from planner.plan.plan import BUCKET_MIB, Plan
from planner.space import Space, backward_of
from planner.units import listed, plural


class PlannedStage(Protocol):
    """The layers, devices and recomputed layers of a stage."""

    @property
    def layers(self) -> Sequence[str]:
        """Its layers."""

    @property
    def devices(self) -> Sequence[str]:
        """Devices that hold it."""

    @property
    def recompute(self) -> Sequence[str]:
        """Layers that run again in the backward."""

    @property
    def offload(self) -> Sequence[str]:
        """Layers whose stash goes to the host."""


class Outside(NamedTuple):
    """A freedom that a plan uses and a space does not have.

    Attributes:
        field: where the plan uses it.
        found: what the plan has there.
        freedom: name of the freedom, a field of :class:`planner.space.Space`.
        allowed: its value in the space, as in a job file.
        remedy: how to bring the plan into the space, in words.
        needed: the least value of the freedom with which the plan lies in the space.
    """

    field: str
    found: str
    freedom: str
    allowed: str
    remedy: str
    needed: str

    def in_job(self) -> str:
        """Return the problem that a plan lies outside the space of its job."""
        return (
            f"{self.field}: {self.found}, but job.{self.freedom} is {self.allowed}; {self.remedy} "
            f"or set job.{self.freedom} to {self.needed}"
        )

    def in_bound(self) -> str:
        """Return the problem that a plan lies outside the space of its bound."""
        return (
            f"provenance.bound_covers: {self.freedom} is {self.allowed}, but {self.field}: "
            f"{self.found}; the bound does not cover this plan; run `pipeplan simulate PLAN -o "
            "PLAN`, which drops the bound, or plan again"
        )


def outside(
    space: Space,
    stages: Sequence[PlannedStage],
    orders: Orders,
    layers: Sequence[str],
    *,
    overlaps: bool = False,
) -> Iterator[Outside]:
    """Yield the freedoms that a plan uses and a space does not have; none if it lies within.

    Args:
        space: the freedoms.
        stages: of the plan; devices and layers need not exist.
        orders: operations by device; none: only the stages are looked at.
        layers: of the model, in executable order.
        overlaps: whether reductions overlap with the last backwards.
    """
    of_stages = [*_of_numbers(space, stages), *_of_cuts(space, stages, layers)]
    of_stages += [*_of_devices(space, stages), *_of_placement(space, stages)]
    of_stages += _of_blocks(space, stages, layers)
    yield from of_stages
    yield from _of_reductions(space, stages, overlaps)
    yield from _of_backwards(space, orders)
    restricts_orders = space.has_pipelines or space.order != "any"
    if restricts_orders and not of_stages and is_complete(stages, orders):
        yield from _of_orders(space, stages, orders)


def outside_bound(
    space: Space,
    stages: Sequence[PlannedStage],
    orders: Orders,
    layers: Sequence[str],
    bucket_bytes: float | None,
) -> Iterator[Outside]:
    """Yield what keeps a plan out of a bound over a space; none if the bound covers it.

    A job leaves the size of buckets open, but bounds count latencies of the default size.

    Args:
        space: the freedoms that the bound covers.
        stages: of the plan.
        orders: operations by device.
        layers: of the model, in executable order.
        bucket_bytes: size of the buckets that are reduced while last backwards run; None: gradients
            are reduced after them.
    """
    yield from outside(space, stages, orders, layers, overlaps=bucket_bytes is not None)
    if bucket_bytes is None or not space.overlap_reduction:
        return
    if bucket_bytes != BUCKET_MIB * 2**20 and any(len(stage.devices) > 1 for stage in stages):
        yield Outside(
            "sync.options",
            f"buckets of {bucket_bytes / 2**20:g} MiB",
            "overlap_reduction",
            f"true, with buckets of {BUCKET_MIB:g} MiB",
            "leave the size of buckets out",
            "true",
        )


def outside_packing(space: Space, plan: Plan) -> Iterator[Outside]:
    """Yield the groups of a plan that a bound over every size of groups does not cover.

    Such a bound covers one packing of the cluster's devices of each size, and packings of several
    sizes that it names. One over a single size is for the plan's own groups, which its digest
    names.

    Args:
        space: the freedoms that the bound covers.
        plan: as it was read.
    """
    parallel = plan.tensor_parallel
    if space.tensor_parallel != "any" or parallel is None:
        return
    if len(parallel.degrees) > 1:
        is_covered = parallel.digest in plan.provenance.bound_covers.packings
    else:
        is_covered = parallel.groups == packed(plan.cluster, parallel.degrees[0])
    if not is_covered:
        yield Outside(
            "tensor_parallel.groups",
            "other groups than the search packed",
            "tensor_parallel",
            '"any"',
            "plan again",
            listed(parallel.degrees),
        )


def outside_state(space: Space, plan: Plan) -> Iterator[Outside]:
    """Yield that a plan's replicas share what those of a bound's plans do not, or vice versa.

    Args:
        space: the freedoms that the bound covers.
        plan: as it was read.
    """
    rows = {
        "shard_optimizer": (plan.job.shards_state, space.shards_state),
        "shard_parameters": (plan.job.shards_parameters, space.shards_parameters),
    }
    for name, pair in rows.items():
        found, allowed = (str(value).lower() for value in pair)
        if found != allowed:
            yield Outside(f"job.{name}", found, name, allowed, "plan again", found)


def is_complete(stages: Sequence[PlannedStage], orders: Orders) -> bool:
    """Return whether every stage runs the same microbatches, on devices that hold it."""
    owner = owners(orders)
    ran: dict[int, set[int]] = {}
    for (stage, microbatch), device in owner.items():
        if stage >= len(stages) or device not in stages[stage].devices:
            return False
        ran.setdefault(stage, set()).add(microbatch)
    return len(ran) == len(stages) and all(held == ran[0] for held in ran.values())


# --- stages ---------------------------------------------------------------------------------------


def _of_numbers(space: Space, stages: Sequence[PlannedStage]) -> Iterator[Outside]:
    most, count = space.max_stages, len(stages)
    if most is not None and count > most:
        found = f"there are {count} stages"
        yield Outside(f"stages[{most}]", found, "max_stages", str(most), "merge stages", str(count))
    if count < space.min_stages:
        found, least = f"there {_are(count)}", str(space.min_stages)
        yield Outside("stages", found, "min_stages", least, "divide stages", str(count))


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {plural(count, 'stage')}"


def _of_cuts(
    space: Space, stages: Sequence[PlannedStage], layers: Sequence[str]
) -> Iterator[Outside]:
    if space.cuts is None:
        return
    stage_of = {name: index for index, stage in enumerate(stages) for name in stage.layers}
    allowed, wrong = set(space.cuts), []
    for before, layer in pairwise(layers):
        first, second = stage_of.get(before), stage_of.get(layer)
        if layer not in allowed and None not in (first, second) and first != second:
            wrong.append((second, layer))
    if wrong:
        stage, layer = wrong[0]
        yield Outside(
            f"stages[{stage}].layers",
            f"a cut before {layer!r}" + (f" and {len(wrong) - 1} more" if wrong[1:] else ""),
            "cuts",
            f"a list of {plural(len(allowed), 'layer')} without it",
            "move the cut",
            "one with it, or null",
        )


def _of_devices(space: Space, stages: Sequence[PlannedStage]) -> Iterator[Outside]:
    held_by: dict[str, set[int]] = {}
    for position, stage in enumerate(stages):
        for device in stage.devices:
            held_by.setdefault(device, set()).add(position)
        devices, again, away = len(stage.devices), stage.recompute, stage.offload
        used = {
            "replication": ("devices", f"{devices} devices", devices > 1, "keep one device"),
            "recompute": ("recompute", plural(len(again), "layer"), again, "keep their stashes"),
            "offload": (
                *("offload", plural(len(away), "layer"), away),
                "keep their stashes on the device",
            ),
        }
        for freedom, (field, found, is_used, remedy) in used.items():
            if is_used and not getattr(space, freedom):
                place = f"stages[{position}].{field}"
                yield Outside(place, found, freedom, "false", remedy, "true")
    for device, positions in held_by.items():
        if len(positions) > space.max_stages_per_device:
            yield Outside(
                f"stages[{min(positions)}].devices",
                f"device {device!r} holds {len(positions)} stages",
                "max_stages_per_device",
                str(space.max_stages_per_device),
                "move stages",
                str(len(positions)),
            )


def _of_blocks(
    space: Space, stages: Sequence[PlannedStage], layers: Sequence[str]
) -> Iterator[Outside]:
    """Yield a stage that recomputes something else than as many first blocks as all others."""
    if space.recompute != "blocks":
        return
    place = {name: position for position, name in enumerate(layers)}
    count = max(block_count(stage.recompute) for stage in stages)
    for position, stage in enumerate(stages):
        held = sorted(stage.layers, key=lambda name: place.get(name, len(place)))
        if set(stage.recompute) != set(first_blocks(held, count)):
            yield Outside(
                f"stages[{position}].recompute",
                f"other layers than those of the first {plural(count, 'block')}",
                "recompute",
                '"blocks"',
                "recompute as many first blocks in every stage",
                "true",
            )
            return


def _of_reductions(
    space: Space, stages: Sequence[PlannedStage], overlaps: bool
) -> Iterator[Outside]:
    if overlaps and not space.overlap_reduction and any(len(s.devices) > 1 for s in stages):
        yield Outside(
            "sync",
            "reductions overlap with backwards",
            "overlap_reduction",
            "false",
            "set sync.options.overlap to false",
            "true",
        )


def _of_placement(space: Space, stages: Sequence[PlannedStage]) -> Iterator[Outside]:
    groups = [frozenset(stage.devices) for stage in stages]
    if space.has_pipelines:
        found = unequal(groups)
        if found is not None:
            position, words = found
            yield _not_equal_pipelines(f"stages[{position}].devices", words)
    shape = shape_of(groups)
    if space.placement == "any" or shape == "loop" or shape in space.placement.split("_or_"):
        return
    yield Outside(
        "stages",
        "a placement in a V" if shape == "v" else "a placement that is neither loop nor V",
        "placement",
        f'"{space.placement}"',
        "move stages",
        '"loop_or_v"' if shape == "v" else '"any"',
    )


def shape_of(groups: Sequence[frozenset[str]]) -> str | None:
    """Return whether stages go round sets of devices as a loop, or down and up again as a V.

    Args:
        groups: the devices of each stage.

    Returns:
        ``loop``, ``v``, or None; one stage on each set is a loop.
    """
    loop = list(dict.fromkeys(groups))
    rounds, rest = divmod(len(groups), len(loop))
    if len(loop) == 1 < len(groups):
        return None
    if not rest and list(groups) == loop * rounds:
        return "loop"
    return "v" if list(groups) == loop + loop[::-1] else None


def unequal(groups: Sequence[frozenset[str]]) -> tuple[int, str] | None:
    """Return the first stage whose devices do not match those of the others, and how."""
    for position, group in enumerate(groups):
        if len(group) != len(groups[0]):
            return position, f"{len(group)} replicas where stage 0 has {len(groups[0])}"
    for (i, first), (j, second) in combinations(enumerate(groups), 2):
        if first != second and first & second:
            return j, f"only some of the devices of stage {i}"
    return None


def _not_equal_pipelines(field: str, found: str) -> Outside:
    return Outside(field, found, "equal_pipelines", "true", "form equal pipelines", "false")


# --- orders ---------------------------------------------------------------------------------------


def _of_backwards(space: Space, orders: Orders) -> Iterator[Outside]:
    if space.backward == "any":
        return
    for device, order in orders.items():
        used = backward_of(operation.kind for operation in order)
        if space.backward != used and any(operation.kind in "BIW" for operation in order):
            yield Outside(
                f"orders[{device!r}]",
                {
                    "whole": "whole backwards (B)",
                    "split": "split backwards (I and W)",
                    "any": "whole and split backwards",
                }[used],
                "backward",
                f'"{space.backward}"',
                f"run {space.backward} ones alone",
                '"any"',
            )


def _of_orders(space: Space, stages: Sequence[PlannedStage], orders: Orders) -> Iterator[Outside]:
    paths = _paths(stages, orders)
    if space.has_pipelines:
        found = _unequal_orders(paths, orders)
        if found is not None:
            yield _not_equal_pipelines(*found)
    if space.order == "1f1b":
        device = _other_than_1f1b(stages, paths, orders)
        if device is not None:
            yield Outside(
                f"orders[{device!r}]",
                "another order than 1F1B",
                "order",
                '"1f1b"',
                "reorder its operations",
                '"any"',
            )


Paths = dict[tuple[str, ...], list[int]]
"""The microbatches that visit the same device at every stage, by these devices."""


def _paths(stages: Sequence[PlannedStage], orders: Orders) -> Paths:
    owner = owners(orders)
    paths: Paths = {}
    for microbatch in sorted({microbatch for _, microbatch in owner}):
        path = tuple(owner[stage, microbatch] for stage in range(len(stages)))
        paths.setdefault(path, []).append(microbatch)
    return paths


def _unequal_orders(paths: Paths, orders: Orders) -> tuple[str, str] | None:
    """Return where pipelines meet, or differ in microbatches, placement or order."""
    for path, other in combinations(paths, 2):
        shared = sorted(set(path) & set(other))
        if shared:
            return f"orders[{shared[0]!r}]", "microbatches of several pipelines"
    first, mine = next(iter(paths.items()))
    expected = _numbered(first, mine, orders)
    for path, held in paths.items():
        if len(held) != len(mine):
            found = f"{plural(len(held), 'microbatch', 'es')}, another has {len(mine)}"
            return f"orders[{path[0]!r}]", found
        if _numbered(path, held, orders) != expected:
            return f"orders[{path[0]!r}]", "another order than another pipeline"
    idle = set(orders) - {device for path in paths for device in path}
    return (f"orders[{min(idle)!r}]", "no microbatch") if idle else None


def _numbered(path: Sequence[str], held: Sequence[int], orders: Orders) -> list[list[Operation]]:
    """Return the orders of a pipeline's devices, its microbatches numbered from 0."""
    number = {microbatch: index for index, microbatch in enumerate(held)}
    return [
        [Operation(stage, kind, number[m]) for stage, kind, m in orders[device]]
        for device in dict.fromkeys(path)
    ]


def _other_than_1f1b(stages: Sequence[PlannedStage], paths: Paths, orders: Orders) -> str | None:
    """Return a device that does not run 1F1B; needs pipelines that keep to themselves."""
    for path, held in paths.items():
        devices = list(dict.fromkeys(path))
        for rank, device in enumerate(devices):
            expected = one_forward_one_backward(rank, len(devices), len(stages), held)
            if expected is None or list(orders[device]) != expected:
                return device
    return None
