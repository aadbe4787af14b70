"""Certificates of bounds: what the checker confirms is never above the best of all plans."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
from tiny_problems import seeds, tiny_problem

from benchmarks.plans.oracle import optimum_below, tiny_problems
from planner import Problem, solve
from planner.bounds import prove as prove_bounds
from planner.costs.collectives import all_reduce_s
from planner.costs.placed_pipeline import StageSpec
from planner.costs.placement import place
from planner.costs.stage_table import StageTable
from planner.plan.certificate import (
    Argument,
    LayerPrices,
    LikeDevices,
    MicrobatchPath,
    TypePrices,
    WorkPrices,
)
from planner.verification.proof import BoundCheck, prove, tied
from planner.verification.proof.buckets import OverlappedReductions
from planner.verification.proof.figures import Figures, FloatArray

LIMIT_S = 0.3
"""Deterministic seconds: certificates need not be of the best bound."""
ROUNDING = 1 + 2e-6
"""The oracle counts in ticks of a nanosecond, of problems of milliseconds."""


def types_of(problem: Problem) -> list[str]:
    """Return the types of devices in use."""
    return list(dict.fromkeys(device.type for device in problem.cluster.devices))


def work_s(problem: Problem) -> FloatArray:
    """Return the seconds of a forward and the least backward, by type in use and layer."""
    table = StageTable(problem)
    seconds = table.arrays.seconds[[table.types.index(kind) for kind in types_of(problem)]]
    return seconds[:, :, 1] + np.minimum(seconds[:, :, 0], seconds[:, :, 2:].sum(axis=2))


def arguments(problem: Problem) -> Iterator[Argument]:
    """Every device by itself and all of a type; prices of layers by their work and at random."""
    devices = problem.cluster.devices
    if problem.job.max_stages_per_device > 1:
        rng, work = random.Random(0), work_s(problem).min(axis=0)
        for _ in range(3):
            yield LayerPrices(prices=tuple(float(s) * rng.uniform(0.7, 1.3) for s in work))
        return
    yield LikeDevices(classes=tuple((device.name,) for device in devices))
    types = dict.fromkeys(device.type for device in devices)
    yield LikeDevices(
        classes=tuple(tuple(d.name for d in devices if d.type == kind) for kind in types)
    )
    yield TypePrices(prices=dict.fromkeys(types, 1.0))
    yield TypePrices(prices={kind: 1 / (1 + n) for n, kind in enumerate(types)})


def most_proved_s(check: BoundCheck, argument: Argument, high_s: float) -> float:
    """Return about the largest time that an argument proves, by bisection."""
    low_s = 0.0
    for _ in range(18):
        middle_s = (low_s + high_s) / 2
        if check.proves(argument, middle_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def require_sound(problem: Problem) -> list[float]:
    """Check all arguments against every plan; return what they prove over the optimum."""
    result = solve(problem, time_limit_s=LIMIT_S, deterministic=True)
    best_s = optimum_below(problem, result.iteration_time_s).time_s
    report = prove(result.plan)
    assert report.problems == ()
    assert report.certificate is not None
    assert report.certificate.bound_s <= best_s * ROUNDING
    check = BoundCheck(problem, problem.job.space)
    speeds = 1 / work_s(problem).sum(axis=1)
    prices = dict(zip(types_of(problem), (speeds / speeds.max()).tolist(), strict=True))
    work = WorkPrices(prices=prices)
    assert max(check.least_s(work), check.least_s(MicrobatchPath())) <= best_s * ROUNDING
    found = [most_proved_s(check, argument, 1.5 * best_s) for argument in arguments(problem)]
    assert all(bound_s <= best_s * ROUNDING for bound_s in found)
    return [bound_s / best_s for bound_s in found]


def several_stages_a_device(problem: Problem, most: int, *, replication: bool) -> Problem:
    """Return the problem with up to so many stages a device."""
    freedoms = {"max_stages_per_device": most, "replication": replication}
    return Problem(problem.graph, problem.cluster, problem.job.model_copy(update=freedoms))


def small_problems(count: int, seed: int) -> Iterator[Problem]:
    """Yield those of so many problems that have few enough plans with two stages a device."""
    for problem in tiny_problems(count, seed):
        if len(problem.graph.layers) <= 4 and len(problem.cluster.devices) <= 2:
            yield problem


def of_two_stages(count: int, seed: int, **job: int) -> Iterator[Problem]:
    """Yield these with two stages a device, with replicas and without."""
    for problem in small_problems(count, seed):
        changed = Problem(problem.graph, problem.cluster, problem.job.model_copy(update=job))
        for replication in (False, True):
            yield several_stages_a_device(changed, 2, replication=replication)


def with_slow_links(seed: int) -> Problem:
    """Return a random problem with ties, switches and slow links."""
    rng = random.Random(seed)
    return tiny_problem(
        seed,
        layers=rng.randint(2, 4),
        devices=rng.randint(2, 3),
        microbatches=rng.randint(1, 4),
        types=rng.randint(1, 3),
        replication=rng.random() < 0.7,
        tied=rng.random() < 0.6,
        topology=rng.choice(["mesh", "switches"]),
        memory_mib=1e5,
        cut_mib=rng.choice([1.0, 7.5, 30.0, 100.0]),
        link_scale=rng.choice([0.2, 1.0, 5.0]),
        backward=rng.choice(["whole", "any", "split"]),
        overlap=rng.random() < 0.6,
        largest_mib=rng.choice([8, 60]),
    )


EXTENSIVE = pytest.mark.extensive


@pytest.mark.parametrize(
    "problems",
    [
        pytest.param(partial(tiny_problems, 3), id="tiny"),
        pytest.param(partial(of_two_stages, 8, 3), id="two stages"),
        *(
            pytest.param(
                lambda n=n: [with_slow_links(n)],
                marks=() if n < 4 else EXTENSIVE,
                id=f"slow links {n}",
            )
            for n in range(16)
        ),
        *(
            pytest.param(partial(tiny_problems, 12, n), marks=EXTENSIVE, id=f"many {n}")
            for n in range(2)
        ),
        *(
            pytest.param(
                partial(of_two_stages, 6, n, microbatches=2), marks=EXTENSIVE, id=f"pairs {n}"
            )
            for n in (4, 5)
        ),
    ],
)
def test_no_certificate_is_above_the_best_of_all_plans(
    problems: Callable[[], Iterable[Problem]],
) -> None:
    shares = [share for problem in problems() for share in require_sound(problem)]
    # They would all be sound if they proved nothing.
    assert sorted(shares)[len(shares) // 2] > 0.8


def test_prices_of_layers_certify_more_than_total_work() -> None:
    problem = several_stages_a_device(next(small_problems(8, 3)), 2, replication=False)
    first, *_, last = prove_bounds(problem)
    assert isinstance(first.argument, WorkPrices | MicrobatchPath)
    assert last.bound_s > 1.05 * first.bound_s
    assert isinstance(last.argument, LayerPrices)


@pytest.mark.parametrize("seed", seeds(3, 5))
def test_little_memory_breaks_no_certificate(seed: int) -> None:
    """Against every partition with every choice of recomputed layers."""
    problem = tiny_problem(
        seed,
        layers=3,
        devices=2,
        microbatches=2 + seed % 3,
        types=1 + seed % 2,
        replication=seed % 4 == 3,
        backward=("whole", "any", "split")[seed % 3],
        memory_mib=(50.0, 70.0, 90.0)[seed % 3],
        recompute=seed % 4 != 2,
        overlap=True,
    )
    optimum = optimum_below(problem, 3.0)
    if optimum.best is not None:
        check = BoundCheck(problem, problem.job.space)
        for argument in arguments(problem):
            bound_s = most_proved_s(check, argument, 1.5 * optimum.time_s)
            assert bound_s <= optimum.time_s * ROUNDING + 2e-7


def test_little_memory_lets_certificates_prove_more() -> None:
    proved_s = []
    for memory_mib in (1000.0, 70.0):
        problem = tiny_problem(
            0,
            layers=3,
            devices=2,
            microbatches=4,
            replication=False,
            memory_mib=memory_mib,
            recompute=True,
        )
        check = BoundCheck(problem, problem.job.space)
        alone = LikeDevices(classes=tuple((name,) for name in problem.cluster.device_names))
        proved_s.append(most_proved_s(check, alone, 10.0))
    ample_s, short_s = proved_s
    assert ample_s * 1.1 < short_s < 9.0


def test_the_classes_of_the_other_stage_of_tied_parameters_prove_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = tiny_problem(
        2,
        layers=3,
        devices=3,
        microbatches=4,
        types=2,
        tied=True,
        topology="switches",
        memory_mib=1e5,
        link_scale=0.3,
        largest_mib=30,
    )
    by_type = list(arguments(problem))[1]
    proved_s = most_proved_s(BoundCheck(problem, problem.job.space), by_type, 10.0)
    monkeypatch.setattr(tied, "MOST_CASES", 0)
    less_s = most_proved_s(BoundCheck(problem, problem.job.space), by_type, 10.0)
    assert proved_s > 1.01 * less_s
    assert proved_s <= optimum_below(problem, 10.0).time_s * ROUNDING


@pytest.mark.parametrize("seed", range(6))
def test_reductions_left_after_a_backward_are_those_of_placed_stages(seed: int) -> None:
    problem = tiny_problem(
        seed, layers=5, devices=3, microbatches=2, overlap=True, tied=seed % 2 == 0, largest_mib=60
    )
    names, devices = tuple(problem.graph.layers), problem.cluster.device_names
    figures = Figures(problem, problem.job.space)
    two = devices[1:]
    partitions = [[(names, devices)]]
    if seed % 2:
        partitions += [[(names[:c], devices[:1]), (names[c:], two)] for c in range(1, 5)]
        partitions += [[(names[:c], two), (names[c:], devices[:1])] for c in range(1, 5)]
    for parts in partitions:
        pipeline = place(problem, [StageSpec(*part) for part in parts])
        begin = 0
        for number, (held, replicas) in enumerate(parts):
            end = begin + len(held)
            left_s = _left_s(figures, replicas)[begin, end]
            tail_s = pipeline.tail_s(number, replicas[0]) - pipeline.optimizer_s[replicas[0]]
            assert left_s == pytest.approx(tail_s, abs=1e-12)
            begin = end


def _left_s(figures: Figures, devices: Sequence[str]) -> FloatArray:
    """Return what is left of all stages' reductions on some devices of the first type."""
    cluster = figures.cluster

    def taken_s(bytes_: FloatArray) -> FloatArray:
        rows = [all_reduce_s(cluster, devices, int(size)) for size in np.ravel(bytes_)]
        return np.reshape(rows, np.shape(bytes_))

    at_once_s = taken_s(figures.parameters.own_bytes)
    return OverlappedReductions(figures).left_s(taken_s, figures.of_layer.backward[0], at_once_s)
