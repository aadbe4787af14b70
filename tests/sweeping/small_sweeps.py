"""A small model and small clusters to sweep, solved in moments."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from builders import boundary, cluster, device_type, graph, layer, link, parameter

from planner.analysis.sweep.engines import InTurn, Outcomes
from planner.analysis.sweep.work import Task
from planner.cluster.cluster import Cluster
from planner.job import Job
from planner.model.layer_graph import LayerGraph
from planner.plan.sweep_index import Point

JOB = Job(microbatches=2, backward="whole", replication=False, optimizer="sgd")
QUICK = {"deterministic": True, "time_limit_s": 0.2}


def chain(samples: int = 1, layers: int = 4, **fields: object) -> LayerGraph:
    """Layers of a second and two for each sample, with 4000 bytes of weights, that hand on one."""
    rows = [layer(f"l{i}", samples, 2 * samples, parameters=[f"w{i}"]) for i in range(layers)]
    cuts = [boundary(f"l{i}", f"l{i + 1}", bytes_=1) for i in range(layers - 1)]
    weights = [parameter(f"w{i}") for i in range(layers)]
    return graph(rows, cuts, weights, samples_per_microbatch=samples, **fields)


def ring(
    devices: int, name: str = "by-hand", price: float | None = None, **fields: object
) -> Cluster:
    """Devices around a switch, with a price each."""
    names = [f"d{i}" for i in range(devices)]
    priced = {} if price is None else {"price_per_hour": price}
    return cluster(
        names,
        [link(name, "hub", 1000) for name in names],
        ["hub"],
        {"unit": device_type(**priced, **fields)},
    )


@dataclass
class Counting:
    """Solves in turn, notes what it was asked for, and may stop as if by Ctrl-C."""

    stop_after: int | None = None
    asked: list[Point] = field(default_factory=list)
    closed: int = 0
    workers: int = 1

    def run(self, tasks: Sequence[Task]) -> Outcomes:
        try:
            for number, task in enumerate(tasks):
                if number == self.stop_after:
                    raise KeyboardInterrupt
                self.asked.append(task.point)
                yield from InTurn().run([task])
        finally:
            self.closed += 1
