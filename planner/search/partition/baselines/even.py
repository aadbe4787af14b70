"""Even splits: what is used when nothing is planned.

Megatron-LM gives every pipeline stage the same number of layers, on devices in the order in which
the ranks are given (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", section 2.2). ``even`` takes as many stages as there are devices, or
layers. ``even-replicated`` follows the paper's second takeaway (section 3.3.1): as few stages as
memory allows, the devices left for data parallelism; the number of stages divides that of devices.
"""

from __future__ import annotations

from planner.search.partition.baselines.baseline import Baseline, nothing_fits
from planner.search.partition.baselines.stage_costs import most_stages
from planner.search.partition.chain import Chain, Partition, StageChoice


def plan(chain: Chain) -> Partition:
    """Return one stage a device, whether or not it fits."""
    return split(chain, most_stages(chain), 1)


def plan_replicated(chain: Chain) -> Partition:
    """Return the fewest stages with which 1F1B fits, on equally many neighbouring devices each.

    Raises:
        InfeasibleError: if no such number of stages fits.
    """
    names = chain.problem.cluster.device_names
    for stages in range(1, most_stages(chain) + 1):
        if len(names) % stages == 0 and (chain.problem.job.replication or stages == len(names)):
            partition = split(chain, stages, len(names) // stages)
            if fits_1f1b(chain, partition):
                return partition
    raise nothing_fits("even-replicated", "the even splits over all devices")


def split(chain: Chain, stages: int, replicas: int) -> Partition:
    """Return equal numbers of layers, the first stages one more, on devices in file order."""
    names, cuts = chain.problem.cluster.device_names, even_cuts(chain, stages)
    return tuple(
        StageChoice(cuts[s], cuts[s + 1], names[s * replicas : (s + 1) * replicas])
        for s in range(stages)
    )


def even_cuts(chain: Chain, stages: int) -> list[int]:
    """Return where stages of equally many layers begin and end, the first ones with one more."""
    less, more = divmod(chain.length, stages)
    return [stage * less + min(stage, more) for stage in range(stages + 1)]


def fits_1f1b(chain: Chain, partition: Partition) -> bool:
    """Return whether every stage has memory for the microbatches 1F1B has in flight.

    Workspace and the stage's input are not counted.
    """
    for index, stage in enumerate(partition):
        layers = slice(stage.begin, stage.end)
        in_flight = min(chain.problem.job.microbatches, len(partition) - index)
        stash = int(chain.stash_bytes[layers].sum())
        needed = int(chain.static_bytes[layers].sum()) + in_flight * stash
        cluster = chain.problem.cluster
        if any(needed > cluster.device_type(device).capacity_bytes for device in stage.devices):
            return False
    return True


EVEN = Baseline("even", "Narayanan et al., SC 2021, section 2.2", plan)
EVEN_REPLICATED = Baseline(
    "even-replicated", "Narayanan et al., SC 2021, section 3.3.1", plan_replicated
)
