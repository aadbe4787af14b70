"""A small model and small clusters to sweep, solved in moments."""

from builders import boundary, cluster, device_type, graph, layer, link, parameter

from planner.cluster.cluster import Cluster
from planner.job import Job
from planner.model.layer_graph import LayerGraph

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
