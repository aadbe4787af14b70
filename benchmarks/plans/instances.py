"""Schedule instances: stages by their times, stashes and caps, as placed pipelines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner import Cluster, Job, LayerGraph, PipeplanError, Problem
from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import place
from planner.records.document import read_json

UNIT_BYTES = 2**20
"""Size of a unit of stash."""
BUFFER_BYTES = 2**16
"""Room for the single bytes that stand for tensors on their way."""
GIB = 2**30


@dataclass(frozen=True)
class Instance:
    """Stages of a pipeline; every list has an entry a stage.

    Attributes:
        name: for reports.
        forward_s, input_gradient_s, weight_gradient_s: of one microbatch.
        send_s: to the next stage, and back from it; an entry less. Transfers never wait.
        stash: units that a forward adds.
        weight_stash: what of them stays from the input gradient until the weight gradient.
        device: number of the device that holds the stage.
        caps: units of stash that each device may hold.
        microbatches: their number.
    """

    name: str
    forward_s: Sequence[float]
    input_gradient_s: Sequence[float]
    weight_gradient_s: Sequence[float]
    send_s: Sequence[float]
    stash: Sequence[int]
    weight_stash: Sequence[int]
    device: Sequence[int]
    caps: Sequence[int]
    microbatches: int

    def pipeline(self) -> PlacedPipeline:
        """The stages, placed."""
        data = self.data()
        graph, cluster = LayerGraph.parse(data["graph"]), Cluster.from_data(data["cluster"])
        specs = [StageSpec(*map(tuple, row)) for row in data["stages"]]
        return place(Problem(graph, cluster, Job.parse(data["job"], self.name)), specs)

    def data(self) -> dict[str, Any]:
        """The problem as plain data of files, and the layers and devices of each stage."""
        job = {"microbatches": self.microbatches, "optimizer": "sgd", "max_stages_per_device": 16}
        return {
            "graph": self._graph(),
            "cluster": self._cluster(),
            "job": {"format": "pipeplan-job/1", **job},
            "stages": [[[f"s{s}"], [f"d{device}"]] for s, device in enumerate(self.device)],
        }

    def _graph(self) -> dict[str, Any]:
        work = ("flops", "traffic_bytes")
        kinds = ("forward", "input_gradient", "weight_gradient")
        layers = [
            {
                "name": f"s{s}",
                **{f"{kind}_{what}": 0 for kind in kinds for what in work},
                "stash_bytes": self.stash[s] * UNIT_BYTES,
                "weight_stash_bytes": self.weight_stash[s] * UNIT_BYTES,
                "measured": {
                    f"type{self.device[s]}": {
                        "forward_s": self.forward_s[s],
                        "input_gradient_s": self.input_gradient_s[s],
                        "weight_gradient_s": self.weight_gradient_s[s],
                    }
                },
            }
            for s in range(len(self.forward_s))
        ]
        boundaries = [
            {
                "name": f"s{s}-{s + 1}",
                "producer": f"s{s}",
                "users": [f"s{s + 1}"],
                "bytes": 1,
                "shape": [1],
                "dtype": "int8",
                "requires_grad": True,
            }
            for s in range(len(layers) - 1)
        ]
        return {
            "format": "pipeplan-graph/2",
            "name": self.name,
            "samples_per_microbatch": 1,
            "precision": "float32",
            "layers": layers,
            "boundaries": boundaries,
            "parameters": [],
        }

    def _cluster(self) -> dict[str, Any]:
        types = {
            f"type{d}": {
                "memory_gib": (cap * UNIT_BYTES + BUFFER_BYTES) / GIB,
                "memory_bandwidth_gb_per_s": 1000,
                "peak_tflop_per_s": {"float32": 1},
                "efficiency": 1,
                "reserved_gib": 0,
            }
            for d, cap in enumerate(self.caps)
        }
        return {
            "format": "pipeplan-cluster/1",
            "name": self.name,
            "device_types": types,
            "devices": [{"name": f"d{d}", "type": f"type{d}"} for d in range(len(self.caps))],
            "links": [*self._links().values()],
        }

    def _links(self) -> dict[tuple[int, int], dict[str, Any]]:
        """One for each pair of neighbours; where several pairs of stages use it, times agree."""
        links: dict[tuple[int, int], dict[str, Any]] = {}
        for (u, v), seconds in zip(pairwise(self.device), self.send_s, strict=True):
            if u != v:
                links.setdefault(
                    (min(u, v), max(u, v)),
                    {
                        "between": [f"d{u}", f"d{v}"],
                        "bandwidth_gb_per_s": 1e9,
                        "latency_us": seconds * 1e6,
                        "shared": True,
                    },
                )
        return links


# --- public instances -----------------------------------------------------------------------------


def zero_bubble_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a file of the form of zero_bubble_instances.json.

    Raises:
        PipeplanError: naming a field that is missing or no number.
    """
    data = read_json(path)
    rows = data.get("instances") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows:
        raise PipeplanError(f"{path}: instances: expected a list of at least one instance")
    for number, row in enumerate(rows):
        for field in ZERO_BUBBLE_FIELDS:
            value = row.get(field) if isinstance(row, dict) else None
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise PipeplanError(
                    f"{path}: instances[{number}].{field}: expected a number of at least 0 "
                    f"(found {value!r})"
                )
    return rows


ZERO_BUBBLE_FIELDS = (
    "stages",
    "microbatches",
    "forward",
    "backward_input",
    "backward_weight",
    "communication",
    "stash_forward",
    "stash_kept_until_weight",
)


def zero_bubble(row: dict[str, Any], cap: float) -> Instance:
    """A row under a cap of ``cap * stages`` stashes a device; times in microseconds."""
    count = int(row["stages"])

    def each(field: str) -> list[float]:
        return [row[field] * 1e-6] * count

    return Instance(
        name=f"{count} x {row['microbatches']}, {row['forward']}/{row['backward_input']}"
        f"/{row['backward_weight']}",
        forward_s=each("forward"),
        input_gradient_s=each("backward_input"),
        weight_gradient_s=each("backward_weight"),
        send_s=each("communication")[1:],
        stash=[int(row["stash_forward"])] * count,
        weight_stash=[int(row["stash_kept_until_weight"])] * count,
        device=range(count),
        caps=[round(cap * count * row["stash_forward"])] * count,
        microbatches=int(row["microbatches"]),
    )


# --- made instances -------------------------------------------------------------------------------


def uneven(
    stages: int,
    microbatches: int,
    caps: str,
    seed: int,
    *,
    whole: bool = False,
    send_ms: float = 0.3,
) -> Instance:
    """Uneven stages with communication, one a device.

    Forwards of 0.6 to 1.4 ms, gradients a little longer or shorter, transfers half to one and a
    half times as long as they are on average.

    Args:
        stages: their number.
        microbatches: their number.
        caps: stashes a device: ``1f1b`` (as many as 1F1B needs), ``uniform`` (as its first stage
            needs), ``double`` (twice that), or ``loose`` (all microbatches).
        seed: of all that is drawn.
        whole: meant for whole backwards; a split one frees its stash at the end only.
        send_ms: milliseconds of a transfer on average.
    """
    draw = random.Random(seed)
    scale = [draw.uniform(0.6, 1.4) for _ in range(stages)]
    limits = {
        "1f1b": [stages - s for s in range(stages)],
        "uniform": [stages] * stages,
        "double": [2 * stages] * stages,
        "loose": [microbatches] * stages,
    }[caps]
    return Instance(
        name=f"{stages} x {microbatches}, caps {caps}, {'B whole' if whole else 'I and W'}",
        forward_s=[_ms(x) for x in scale],
        input_gradient_s=[_ms(x * draw.uniform(0.9, 1.1)) for x in scale],
        weight_gradient_s=[_ms(x * draw.uniform(0.8, 1.0)) for x in scale],
        send_s=[_ms(send_ms * draw.uniform(0.5, 1.5)) for _ in range(stages - 1)],
        stash=[1] * stages,
        weight_stash=[1] * stages,
        device=range(stages),
        caps=[min(limit, microbatches) for limit in limits],
        microbatches=microbatches,
    )


def chunks(
    devices: int,
    microbatches: int,
    placement: str,
    seed: int,
    *,
    whole: bool = False,
    tapered: bool | None = None,
) -> Instance:
    """Two uneven stages a device, with communication.

    Memory: split backwards find 2D stashes of single stages on each device, as ZB-V and 1F1B need.
    With whole ones interleaved 1F1B needs 3D on the first device and two less on each after it; in
    a V all devices hold microbatches for the same time, and so as much is spread evenly: 2D + 1.

    Args:
        devices: their number; twice as many stages.
        microbatches: their number.
        placement: ``interleaved`` (stages go round the devices twice) or ``v`` (down and up).
        seed: of all that is drawn.
        whole: meant for whole backwards.
        tapered: whether the memory is interleaved 1F1B's; if not given, for whole backwards of an
            interleaved placement.
    """
    if tapered is None:
        tapered = whole and placement == "interleaved"
    first = [*range(devices)]
    device = first + (first if placement == "interleaved" else first[::-1])
    flat = uneven(2 * devices, microbatches, "loose", seed, whole=whole)
    # Links between the same devices take the same time.
    times: dict[tuple[int, int], float] = {}
    for (u, v), seconds in zip(pairwise(device), flat.send_s, strict=True):
        times.setdefault((min(u, v), max(u, v)), seconds)
    send = [times[min(u, v), max(u, v)] if u != v else 0.0 for u, v in pairwise(device)]
    even = 2 * devices + 1 if whole else 2 * devices
    caps = [3 * devices - 2 * d if tapered else even for d in range(devices)]
    kind = "B whole" if whole else "I and W"
    if tapered and placement == "v":
        kind += ", interleaved 1F1B's memory"
    return replace(
        flat,
        name=f"{devices} devices x 2 stages x {microbatches}, {placement}, {kind}",
        send_s=send,
        device=device,
        caps=caps,
    )


def _ms(milliseconds: float) -> float:
    """Seconds, to a whole microsecond."""
    return round(milliseconds * 1e3) * 1e-6
