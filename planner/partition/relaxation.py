"""Bounds on every plan whatsoever: from below by the total work, from above one by one."""

import numpy as np

from planner.partition.chain import Chain, FloatArray


def work_bound_s(chain: Chain) -> float:
    """No plan is faster, with any number of stages a device and any schedule.

    The larger of: all layers' work, spread over the devices as evenly as fractions allow, and one
    microbatch's way through all layers, each on its fastest type.
    """
    seconds = np.array([chain.forward_s(t) + chain.backward_s(t) for t in chain.types])
    path = float(seconds.min(axis=0).sum())
    prices = even_load_prices(chain)
    even = float((prices[:, None] * seconds).min(axis=0).sum())
    return max(path, chain.problem.job.microbatches * even)


def longest_plan_s(chain: Chain, max_stages: int) -> float:
    """No plan with one stage a device takes longer that runs one microbatch after the other.

    Every layer on its slowest type, every transfer at the largest cut over the slowest path, all
    gradients around all devices one by one.
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
    seconds = np.array([chain.forward_s(t) + chain.backward_s(t) for t in chain.types])
    work = float(seconds.max(axis=0).sum())
    crossing = float(chain.cut_bytes.max() + chain.cut_gradient_bytes.max())
    transfers = (max_stages - 1) * (2 * latency_s + crossing / width)
    state = float(chain.static_bytes.sum())
    reductions = max_stages + len(chain.tied_parameters)
    reduce_s = 2 * count * (reductions * latency_s + count * state / width)
    memory_width = min(kind.memory_bandwidth_gb_per_s for kind in cluster.device_types.values())
    return microbatches * (work + transfers) + reduce_s + 2 * state / (memory_width * 1e9)


def even_load_prices(chain: Chain) -> FloatArray:
    """Price of a second on each device type, all devices together costing 1.

    By weak duality any such prices give a valid bound: each layer is paid at least its cheapest
    price. The dual values of the even-load linear program give the best one; they are made
    feasible here, so that the solver's tolerances cannot spoil the bound.
    """
    from ortools.linear_solver import pywraplp

    seconds = np.array([chain.forward_s(t) + chain.backward_s(t) for t in chain.types])
    kinds = [device.type for device in chain.problem.cluster.devices]
    counts = np.array([kinds.count(name) for name in chain.types], dtype=float)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    scale = float(seconds.max()) or 1.0
    load = solver.NumVar(0, solver.infinity(), "load")
    shares = [[solver.NumVar(0, 1, "") for _ in row] for row in seconds]
    for layer in zip(*shares, strict=True):
        solver.Add(sum(layer) == 1)
    rows = []
    for row, times, count in zip(shares, seconds, counts, strict=True):
        work = sum(share * (t / scale) for share, t in zip(row, times, strict=True))
        rows.append(solver.Add(work <= load * count))
    solver.Minimize(load)
    solver.Solve()
    prices = np.array([max(0.0, -row.dual_value()) for row in rows])
    total = float((prices * counts).sum())
    return prices / total if total > 0 else 1 / (counts * len(counts))
