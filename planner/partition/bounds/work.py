"""Bounds on every plan whatsoever: from below by the total work, from above one by one."""

import numpy as np

from planner.partition.chain import Chain


def work_bound_s(chain: Chain) -> float:
    """No plan is faster, with any number of stages a device and any schedule.

    The larger of: all layers' work, spread over the devices as evenly as fractions allow, and one
    microbatch's way through all layers, each on its fastest type.
    """
    path = float(chain.least_work_s.sum())
    even = float((chain.load_prices[:, None] * chain.work_s).min(axis=0).sum())
    return max(path, chain.problem.job.microbatches * even)


def longest_plan_s(chain: Chain, max_stages: int, crossing_bytes: float | None = None) -> float:
    """No plan with one stage a device takes longer that runs one microbatch after the other.

    Every layer on its slowest type, recomputed if it may be, every transfer at the largest cut
    over the slowest path, all gradients around all devices one by one.

    Args:
        chain: the layers.
        max_stages: the largest number of stages.
        crossing_bytes: the most that a cut sends, there and back; of the chain's cuts if not given.
    """
    problem = chain.problem
    cluster, microbatches = problem.cluster, problem.job.microbatches
    links = cluster.link_table
    joined = np.isfinite(links.s_per_byte)
    latency_s = float(links.latency_s[joined].max())
    # Ring steps of all devices at once may share a link.
    slowest = float(links.s_per_byte[joined].max())
    width = 1 / slowest if slowest > 0 else np.inf
    count = len(cluster.devices)
    forwards = 2 if problem.job.recompute else 1
    seconds = [forwards * chain.forward_s(t) + chain.backward_s(t) for t in chain.types]
    work = float(np.max(seconds, axis=0).sum())
    crossing = crossing_bytes
    if crossing is None:
        crossing = float(chain.cut_bytes.max() + chain.cut_gradient_bytes.max())
    transfers = (max_stages - 1) * (2 * latency_s + crossing / width)
    state = float(chain.static_bytes.sum())
    reductions = max_stages + len(chain.tied_parameters)
    reduce_s = 2 * count * (reductions * latency_s + count * state / width)
    memory_width = min(kind.memory_bandwidth_gb_per_s for kind in cluster.device_types.values())
    return microbatches * (work + transfers) + reduce_s + 2 * state / (memory_width * 1e9)
