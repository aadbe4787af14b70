"""What the simulator predicts for worlds that one machine cannot be, and what the choice costs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import fmean

from benchmarks.harness import Claim, Result, tell
from benchmarks.sync.figures import Look, Measured, rows_of
from benchmarks.sync.real import RATES, SHORT_STRATEGIES, STRATEGIES
from benchmarks.sync.uniform import uniform_world
from planner.sync.choice import HORIZON, SEEDS, choose
from planner.sync.simulation.comparison import compare_syncs
from planner.sync.simulation.run import Scenario, simulate_sync
from planner.sync.simulation.slowness import parse_slowness
from planner.sync.simulation.training import Learning
from planner.sync.simulation.world import LinkCost, World
from planner.sync.strategies import parse_sync, sync_name

COMPUTE_S, BACKWARD_SHARE = 0.1, 2 / 3
PARAMETER_BYTES = 100_000_000
WITHIN = LinkCost(1e-5, 10.0)
LATENCY_S = 5e-5
ITERATIONS = 400
"""Steps of each pipeline: enough that the first ten, in which momentum has yet to grow, hardly
count. A server that steps on every gradient passes them sooner, and few iterations flatter it."""
WAVES = tuple(f"wave_synchronous:distance={distance}" for distance in (0, 4, 16))
"""HetPipe's waves; ``wave_synchronous`` alone has the default distance."""
AFTER_CHOICE = 2 * SEEDS
"""The first seed that no choice has seen, for its times or its learning rates."""
FLATTERED = ("parameter_server:mode=async", "eager_parameter_server")
"""Asynchronous servers, which the small problem that is simulated flatters."""


@dataclass(frozen=True)
class Setting:
    """A world and what happens in it.

    Attributes:
        name: of the setting.
        world: pipelines and links.
        slowness: as the simulator reads it.
    """

    name: str
    world: World
    slowness: str = "steady"

    def scenario(self, seed: int, iterations: int = ITERATIONS) -> Scenario:
        """Return the scenario with a seed."""
        trace, faults = parse_slowness(self.slowness)
        return Scenario(self.world, iterations, trace, faults, Learning(seed=seed))


def flat_world(workers: int, communication: float, per_node: int = 1) -> World:
    """Return pipelines of one rank.

    Args:
        workers: how many.
        communication: seconds of all bytes in an all-reduce over those of computation; it goes
            over the links between nodes, those within are fast.
        per_node: workers that share a node's card.
    """
    link = LinkCost(LATENCY_S, 2 * PARAMETER_BYTES / (communication * COMPUTE_S) / 1e9)
    world = uniform_world(
        *(workers, COMPUTE_S, PARAMETER_BYTES, link),
        backward_share=BACKWARD_SHARE,
        pipelines_per_node=per_node,
    )
    return replace(world, within=WITHIN) if per_node > 1 else world


def settings() -> list[Setting]:
    """Return 8 workers by the cost of their links, and 16 in 4 nodes by who is slow."""
    slownesses = {
        "steady": "steady",
        "one_2x_slow": "slow:0x2",
        "one_4x_slow": "slow:0x4",
        "one_5x_slow": "slow:0x5",
        "a_node_4x_slow": "slow:0x4,1x4,2x4,3x4",
        "sleeps": "sleep:0.1:0.3",
        "drift": "drift:0.3",
    }
    nodes, shared = flat_world(16, 0.02, per_node=4), flat_world(16, 1.0, per_node=4)
    return [
        *(Setting(f"flat_{part:g}", flat_world(8, part)) for part in (0.02, 0.3, 1.0, 1.33, 3.0)),
        *(Setting(f"sixteen_{name}", nodes, slow) for name, slow in slownesses.items()),
        Setting("cards_steady", shared),
        Setting("cards_one_2x_slow", shared, "slow:0x2"),
        Setting("cards_sleeps", shared, "sleep:0.1:0.1"),
    ]


def simulated(options: argparse.Namespace) -> Result:
    """Every strategy in simulated worlds."""
    chosen = settings()[2:9:6] if options.short else settings()
    strategies = (*STRATEGIES, *WAVES)
    if options.short:
        strategies = (*SHORT_STRATEGIES, "cross_iteration", "partial_all_reduce")
    seeds = options.seeds or (1 if options.short else 3)
    tasks = [(s, name, seed) for s in chosen for name in strategies for seed in range(seeds)]
    found: dict[str, dict[str, list[Measured]]] = {}
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for (setting, name, _), run in zip(tasks, pool.imap(_simulate, tasks), strict=True):
            found.setdefault(setting.name, {}).setdefault(name, []).append(run)
    rows = [row for name, runs in found.items() for row in rows_of(name, runs)]
    return Result(rows, list(_claims(rows)))


def _simulate(task: tuple[Setting, str, int]) -> Measured:
    setting, strategy, seed = task
    scenario = setting.scenario(seed)
    run = simulate_sync(scenario, parse_sync(strategy))
    looks = [Look(look.at_s, look.iterations, look.loss) for look in run.observations]
    final = run.loss_after(scenario.iterations * scenario.world.workers)
    return Measured(run.iterations_per_s, looks, final)


def _claims(rows: Sequence[dict[str, object]]) -> list[Claim]:
    """Return what the papers claim of settings that were simulated."""
    by_name = {(row["setting"], row["strategy"]): row for row in rows}
    claims = []
    for setting, strategy, column, source, bar in (
        ("flat_1", "cross_iteration", "against overlapped", "Jin's thesis: 29.2 % faster", 1.292),
        ("flat_1.33", "decoupled", "against overlapped", "Jin's thesis: 29.2 % faster", 1.292),
        (
            *("sixteen_one_5x_slow", "partial_all_reduce", "against overlapped"),
            *("Prague: 4.4 times all-reduce", 4.4),
        ),
        (
            *("sixteen_sleeps", "semi_decentralized:overlap=true"),
            *("to the loss, against overlapped", "SDPipe: faster under random sleeps", 1.0),
        ),
    ):
        if row := by_name.get((setting, strategy)):
            text = f"simulated, {setting}: `{strategy}` {column} all-reduce"
            figure = row[column]
            assert figure is None or isinstance(figure, float)
            claims.append(Claim(text, figure, source, at_least=bar))
    return claims


def choice(options: argparse.Namespace) -> Result:
    """What `--sync choose` costs against the fastest strategy, simulated.

    Every strategy is simulated for longer, with seeds that the choice has not seen and at its own
    best learning rate. The regret is by how much more time the chosen one needs to the held-out
    losses that overlapped all-reduce has after 10 to 50 % of its work.
    """
    chosen = settings()[:1] if options.short else settings()
    tasks = [(setting, options.seeds or (2 if options.short else 8)) for setting in chosen]
    rows = []
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for (setting, _), found in zip(tasks, pool.imap(_judged, tasks), strict=True):
            name, gains = found
            fastest = max(set(gains) - {*FLATTERED}, key=lambda other: gains[other])
            regret = 100 * (gains[fastest] / gains[name] - 1) if gains[name] else None
            row = {"setting": setting.name, "chosen": name, "fastest": fastest}
            rows.append({**row, "regret %": regret})
            tell(str(rows[-1]))
    regrets = [row["regret %"] for row in rows]
    known = None if None in regrets else regrets
    return Result(
        rows,
        [
            Claim("mean regret of the choice", known and fmean(known), at_most=3.0, unit="%"),
            Claim("largest regret of the choice", known and max(known), at_most=10.0, unit="%"),
        ],
    )


def _judged(task: tuple[Setting, int]) -> tuple[str, dict[str, float]]:
    """Return the choice in a setting, and by strategy how much sooner than all-reduce it is."""
    setting, seeds = task
    chosen = choose(setting.scenario(0, HORIZON)).sync
    found = compare_syncs(setting.scenario(AFTER_CHOICE), seeds=seeds, rates=RATES)
    return sync_name(chosen), {sync_name(row.sync): row.target_speedup for row in found.results}
