"""The plans that are replanned, and what becomes of their machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import ROOT
from planner import Cluster, Job, ModelSource, Problem, trace

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Training:
    """A model on machines.

    Attributes:
        name: in the report.
        factory: ``module:factory``.
        cluster: its machines.
        job: its job.
        events: words of the command line by what happens.
    """

    name: str
    factory: str
    cluster: Cluster
    job: Job
    events: dict[str, list[str]]

    def problem(self) -> Problem:
        """Traced."""
        source = ModelSource(self.factory, self.job.model_arguments)
        return Problem(trace(self.factory, self.job), self.cluster, self.job, source)


def trainings() -> Iterator[Training]:
    """Two models on 64 equal and 64 unlike GPUs, one on the nine of the example."""
    gpt2_xl = _job(2, 64, 1024)
    llama = _job(1, 64, 2048)
    eight = {
        "device lost": ["--lost", "n1/gpu3"],
        "node lost": ["--lost", "n1"],
        "device slow x1.5": ["--slow", "n2/gpu1:1.5"],
        "node added": ["--added", "spare=n0"],
    }
    for name, factory, job in (
        ("GPT-2 XL", "models.gpt:gpt2_xl", gpt2_xl),
        ("Llama 2 7B", "models.llama:llama2_7b", llama),
    ):
        yield Training(f"{name}, 8 x 8 A100", factory, equal_nodes(), job, eight)
        yield Training(f"{name}, 64 unlike GPUs", factory, unlike_nodes(), job, eight)
    nine = Cluster.load(EXAMPLES / "clusters/irregular.toml")
    events = {
        "device lost": ["--lost", "old/gpu0"],
        "node lost": ["--lost", "old"],
        "device slow x1.5": ["--slow", "big/gpu1:1.5"],
        "device added": ["--added", "old/gpu3=old/gpu0"],
    }
    yield Training(
        "GPT-2 small, irregular.toml",
        "models.gpt:gpt2_small",
        nine,
        Job.load(EXAMPLES / "jobs/gpt2.toml"),
        events,
    )


def _job(samples: int, microbatches: int, tokens: int) -> Job:
    return Job(
        samples_per_microbatch=samples,
        microbatches=microbatches,
        precision="bfloat16",
        model_arguments={"sequence_length": tokens},
    )


def equal_nodes() -> Cluster:
    """Eight nodes of eight A100 on one switch."""
    nodes = [_node(f"n{number}", 8, "A100-80GB", "NVLink3") for number in range(8)]
    return _cluster("8x8", nodes, ["network"], [_to(node, "network") for node in nodes])


def unlike_nodes() -> Cluster:
    """Two racks: H100 and A100 with NVLink, A10 and L4 on PCIe, a narrow link between the racks."""
    kinds = [("A100-80GB", "NVLink3", 8)] * 3 + [("H100-80GB", "NVLink4", 8)] * 2
    kinds += [("A100-40GB", "PCIe4-x16", 4)] * 2 + [("L40S", "PCIe4-x16", 4)] * 2
    kinds += [("A10", "PCIe4-x16", 4)] * 2
    nodes = [_node(f"n{i}", count, kind, link) for i, (kind, link, count) in enumerate(kinds)]
    racks = ["rack0" if number < 5 else "rack1" for number in range(len(nodes))]
    links = [
        _to(node, rack, "InfiniBand-HDR" if rack == "rack0" else "Ethernet-100G")
        for node, rack in zip(nodes, racks, strict=True)
    ]
    links.append({"between": ["rack0", "rack1"], "preset": "Ethernet-100G"})
    return _cluster("unlike", nodes, ["rack0", "rack1"], links)


def _node(name: str, devices: int, kind: str, link: str) -> dict[str, Any]:
    return {"name": name, "devices": devices, "type": kind, "link": link}


def _to(node: dict[str, Any], switch: str, preset: str = "InfiniBand-HDR") -> dict[str, Any]:
    return {"between": [node["name"], switch], "preset": preset}


def _cluster(
    name: str, nodes: list[dict[str, Any]], switches: list[str], links: list[dict[str, Any]]
) -> Cluster:
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "name": name,
            "nodes": nodes,
            "switches": switches,
            "links": links,
        }
    )
