"""Even splits, and the grid of them that people try by hand.

Megatron-LM gives every pipeline stage the same number of layers, on devices in the order in which
the ranks are given (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", section 2.2). ``even`` takes as many stages as there are devices, or
layers. ``even-replicated`` follows the paper's second takeaway (section 3.3.1): as few stages as
memory allows, the devices left for data parallelism; the number of stages divides that of devices.

``grid`` has every even number of stages, the other devices as replicas. With tensor-parallel groups
as devices, of every size, these are the even layouts of Megatron-LM: tensor x pipeline x data
parallelism (section 3). Stages have equally many blocks, the first one the embedding and the last
one the head; replicas are neighbours in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from planner.baselines.layers import Baseline, Layers, Stage, Stages, nothing_fits
from planner.errors import PipeplanError
from planner.model.blocks import block_stack


def plan(layers: Layers) -> Stages:
    """Return one stage a device, whether or not it fits."""
    return split(layers, layers.max_stages, 1)


def plan_replicated(layers: Layers) -> Stages:
    """Return the fewest stages with which 1F1B fits, on equally many neighbouring devices each.

    Raises:
        InfeasibleError: if no such number of stages fits.
    """
    devices = len(layers.problem.cluster.devices)
    for count in range(1, layers.max_stages + 1):
        if devices % count == 0 and (layers.problem.job.replication or count == devices):
            stages = split(layers, count, devices // count)
            if fits_1f1b(layers, stages):
                return stages
    raise nothing_fits("even-replicated", "the even splits over all devices")


def split(layers: Layers, stages: int, replicas: int) -> Stages:
    """Return equal numbers of layers, the first stages one more, on devices in file order."""
    return _on(layers.problem.cluster.device_names, even_cuts(layers, stages), replicas)


def _on(names: Sequence[str], cuts: Sequence[int], replicas: int) -> Stages:
    return tuple(
        Stage(begin, end, tuple(names[s * replicas : (s + 1) * replicas]))
        for s, (begin, end) in enumerate(pairwise(cuts))
    )


def even_cuts(layers: Layers, stages: int) -> list[int]:
    """Return where stages of equally many layers begin and end, the first ones with one more."""
    less, more = divmod(layers.length, stages)
    return [stage * less + min(stage, more) for stage in range(stages + 1)]


def fits_1f1b(layers: Layers, stages: Stages) -> bool:
    """Return whether every stage has memory for the microbatches 1F1B has in flight.

    Workspace and the stage's input are not counted.
    """
    cluster, microbatches = layers.problem.cluster, layers.problem.job.microbatches
    for index, row in enumerate(stages):
        held = slice(row.begin, row.end)
        in_flight = min(microbatches, len(stages) - index)
        static = layers.static_bytes(len(row.devices))
        for device in row.devices:
            kind = layers.kind_of(device)
            needed = static[kind, held].sum() + in_flight * layers.stash_bytes[kind, held].sum()
            if needed > cluster.device_type(device).capacity_bytes:
                return False
    return True


def grid(layers: Layers) -> Iterator[Stages]:
    """Yield the grid: every number of stages that divides the blocks, with its replicas.

    A number of stages has as many replicas as there are devices for, fewer where they could not
    share the microbatches equally. The layers of a model without a stack of blocks are divided as
    evenly as they go, into any number of stages. Where types of devices differ in speed, the grid
    of the fastest ones alone is there as well: a slow device holds up every even layout.
    """
    found: dict[Stages, None] = {}
    job = layers.problem.job
    for names in _device_choices(layers):
        for count in range(job.min_stages, min(layers.max_stages, len(names)) + 1):
            cuts = _block_cuts(layers, count)
            if cuts is not None:
                most = len(names) // count if job.replication else 1
                replicas = next(r for r in range(most, 0, -1) if job.microbatches % r == 0)
                stages = layers.at_cuts(_on(names, cuts, replicas))
                if stages is not None:
                    found.setdefault(stages)
    yield from found


def _device_choices(layers: Layers) -> Iterator[list[str]]:
    """Yield all devices, then those of the fastest types without the slower ones."""
    model_s = dict(zip(layers.kinds, layers.work_s.sum(axis=1).tolist(), strict=True))
    names = layers.problem.cluster.device_names
    for most_s in sorted(set(model_s.values()), reverse=True):
        yield [name for name in names if model_s[layers.kind_of(name)] <= most_s]


def _block_cuts(layers: Layers, stages: int) -> list[int] | None:
    """Return where equal stages begin and end; None if the blocks cannot be shared equally."""
    try:
        stack = block_stack(layers.problem.graph)
    except PipeplanError:
        return even_cuts(layers, stages)
    each, rest = divmod(len(stack.blocks), stages)
    if rest or not each:
        return None
    firsts = [layers.table.layers.index(block.layers[0]) for block in stack.blocks]
    return [0, *firsts[each::each], layers.length]


def plan_grid(layers: Layers) -> Stages:
    """Return the point of the grid that fits 1F1B and is quickest without transfers.

    Raises:
        InfeasibleError: if none fits.
    """
    fitting = [stages for stages in grid(layers) if fits_1f1b(layers, stages)]
    if not fitting:
        raise nothing_fits("grid", "the even splits with equal replicas")
    return min(fitting, key=lambda stages: _seconds(layers, stages))


def _seconds(layers: Layers, stages: Stages) -> float:
    """Return the work of the slowest stage for its microbatches and those of the bubble."""
    longest_s = max(
        float(layers.work_s[layers.kinds.index(layers.kind_of(device)), row.begin : row.end].sum())
        for row in stages
        for device in row.devices
    )
    share = layers.problem.job.microbatches / len(stages[0].devices)
    return longest_s * (share + len(stages) - 1)


EVEN = Baseline("even", "Narayanan et al., SC 2021, section 2.2", plan)
EVEN_REPLICATED = Baseline(
    "even-replicated", "Narayanan et al., SC 2021, section 3.3.1", plan_replicated
)
GRID = Baseline("grid", "Narayanan et al., SC 2021, section 3", plan_grid, grid)
