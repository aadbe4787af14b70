"""The grid that people try by hand: every even number of stages, the other devices as replicas.

With tensor-parallel groups as devices, of every size, these are the even layouts of Megatron-LM:
tensor x pipeline x data parallelism (Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", section 3). Stages have equally many blocks, the first
one the embedding and the last one the head; replicas are neighbours in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.errors import PipeplanError
from planner.model.blocks import block_stack
from planner.search.partition.baselines.baseline import Baseline, nothing_fits
from planner.search.partition.baselines.even import even_cuts, fits_1f1b
from planner.search.partition.chain import Chain, Partition, StageChoice

NAME = "grid"


def partitions(chain: Chain) -> Iterator[Partition]:
    """Yield the grid: every number of stages that divides the blocks, with its replicas.

    A number of stages has as many replicas as there are devices for, fewer where they could not
    share the microbatches equally. The layers of a model without a stack of blocks are divided as
    evenly as they go, into any number of stages. Where types of devices differ in speed, the grid
    of the fastest ones alone is there as well: a slow device holds up every even layout.
    """
    found: dict[Partition, None] = {}
    for names in _device_choices(chain):
        for stages in range(chain.problem.job.min_stages, min(chain.max_stages, len(names)) + 1):
            partition = _partition(chain, names, stages)
            if partition is not None:
                found.setdefault(partition)
    yield from found


def _device_choices(chain: Chain) -> Iterator[tuple[str, ...]]:
    """Yield all devices, then those of the fastest types without the slower ones."""
    cluster, model_s = chain.problem.cluster, chain.model_s
    for most_s in sorted(set(model_s.values()), reverse=True):
        yield tuple(n for n in cluster.device_names if model_s[cluster.type_of(n)] <= most_s)


def _partition(chain: Chain, names: Sequence[str], stages: int) -> Partition | None:
    """Return equal stages on devices; None if the blocks cannot be shared equally."""
    job, cuts = chain.problem.job, _cuts(chain, stages)
    if cuts is None:
        return None
    most = len(names) // stages if job.replication else 1
    replicas = next(r for r in range(most, 0, -1) if job.microbatches % r == 0)
    return chain.at_cuts(
        tuple(
            StageChoice(cuts[s], cuts[s + 1], tuple(names[s * replicas : (s + 1) * replicas]))
            for s in range(stages)
        )
    )


def _cuts(chain: Chain, stages: int) -> list[int] | None:
    """Return where equal stages begin and end; None if the blocks cannot be shared equally."""
    try:
        stack = block_stack(chain.problem.graph)
    except PipeplanError:
        return even_cuts(chain, stages)
    each, rest = divmod(len(stack.blocks), stages)
    if rest or not each:
        return None
    firsts = [chain.names.index(block.layers[0]) for block in stack.blocks]
    return [0, *firsts[each::each], chain.length]


def plan(chain: Chain) -> Partition:
    """Return the point of the grid that fits 1F1B and is quickest without transfers.

    Raises:
        InfeasibleError: if none fits.
    """
    fitting = [partition for partition in partitions(chain) if fits_1f1b(chain, partition)]
    if not fitting:
        raise nothing_fits(NAME, "the even splits with equal replicas")
    return min(fitting, key=lambda partition: _seconds(chain, partition))


def _seconds(chain: Chain, partition: Partition) -> float:
    """Return the work of the slowest stage for its microbatches and those of the bubble."""
    kind_of = {name: number for number, name in enumerate(chain.types)}
    longest_s = max(
        float(chain.work_s[kind_of[chain.problem.cluster.type_of(device)], s.begin : s.end].sum())
        for s in partition
        for device in s.devices
    )
    share = chain.problem.job.microbatches / len(partition[0].devices)
    return longest_s * (share + len(partition) - 1)


GRID = Baseline(NAME, "Narayanan et al., SC 2021, section 3", plan, all_plans=partitions)
