"""The problems of every part: the frozen corpus, published ones, and those drawn at random."""

from __future__ import annotations

import gzip
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.plans import drawn, fitting, schedules
from benchmarks.plans.drawn import Data
from planner import PipeplanError

CORPUS = ROOT / "benchmarks" / "plans" / "corpus"
TABLE: Data = tomllib.loads((CORPUS / "problems.toml").read_text())
TINY = CORPUS / "tiny_optima.json"
"""The best times of the tiny problems, by :func:`benchmarks.plans.oracle.optima`."""
GENERATED_CLUSTERS: dict[str, tuple[int, ...]] = {
    "thousand_one_type": (128,),
    "thousand_three_types": (48, 48, 32),
}
"""Nodes of eight devices by type."""
SAILOR = (("32_96", 2, 5.40, 4.35), ("80_240", 1, 3.25, 2.12), ("128_384", 1, 2.15, 1.41))
"""Its clusters, samples a microbatch, and times to reach, of blocking and of overlapped messages:
those of its own planner's plans and of our longest searches."""


@dataclass(frozen=True)
class Case:
    """A problem, or stages whose schedule is asked for.

    Attributes:
        name: of the problem.
        group: of the table.
        make: returns graph, cluster and job as plain data of files, and what else there is of
            ``runtime``, ``rules`` with ``prices``, and, of a schedule, ``stages`` and ``split``.
        known_s: a time to compare with: the best known, an optimum or a bar.
        wider: name of the case whose space includes that of this one.
        is_schedule: whether only the schedule of given stages is asked for.
        conflict: names of the rules that no plan keeps together.
    """

    name: str
    group: str
    make: Callable[[], Data] = field(repr=False)
    known_s: float | None = None
    wider: str | None = None
    is_schedule: bool = False
    conflict: tuple[str, ...] = ()


def read_graph(name: str) -> Data:
    """Return a frozen graph, or one that the table says how to generate."""
    row = TABLE["graphs"][name]
    if "generated" in row:
        return drawn.chain(**row["generated"])
    path = CORPUS / "graphs" / f"{name}.json.gz"
    graph: Data = json.loads(gzip.decompress(path.read_bytes()))
    return graph


def read_cluster(name: str) -> Data:
    """Return a cluster of the corpus."""
    if name in GENERATED_CLUSTERS:
        return drawn.two_level(GENERATED_CLUSTERS[name], 8)
    return tomllib.loads((CORPUS / "clusters" / f"{name}.toml").read_text())


def problem_of(row: Data, **changes: Any) -> Data:
    """Return the data of a row of the table, with other fields of the job."""
    graph = TABLE["graphs"][row["graph"]]
    job = {"format": "pipeplan-job/1", **graph.get("job", {}), **row["job"], **changes}
    data = {"graph": read_graph(row["graph"]), "cluster": read_cluster(row["cluster"]), "job": job}
    return data | (_ruled(data, row["rules"]) if "rules" in row else {})


def _ruled(data: Data, rules: Data) -> Data:
    """Return a problem under rules, with the prices of its devices."""
    cluster = data["cluster"]
    rows = {
        what: [
            {**row, "price_per_hour": TABLE["prices"][row["type"]] * row.get("devices", 1)}
            for row in cluster.get(what, ())
        ]
        for what in ("nodes", "devices")
    }
    return {**data, "cluster": {**cluster, **rows}, "rules": rules}


def corpus(published: Path | None) -> Iterator[Case]:
    """Yield the problems of the table, then those of a data folder, if there is one."""
    for row in TABLE["problems"]:
        yield Case(row["name"], row["group"], lambda row=row: problem_of(row))
    if published is not None:
        yield from _sailor(published / "sailor")
        yield Case("Qwen3 8B, two boxes", "published", lambda: _qwen(published / "qwen8b"))


def _sailor(folder: Path) -> Iterator[Case]:
    runtime = folder / "sailor_rt.toml"
    for cluster, samples, blocking_s, overlapped_s in SAILOR:

        def data(cluster: str = cluster, samples: int = samples) -> Data:
            return {
                "graph": json.loads((folder / f"g_{samples}.json").read_text()),
                "cluster": tomllib.loads((folder / f"c_{cluster}_{samples}.toml").read_text()),
                "job": tomllib.loads((folder / f"j_{samples}_any.toml").read_text()),
            }

        def blocking(data: Callable[[], Data] = data) -> Data:
            return {**data(), "runtime": tomllib.loads(runtime.read_text())}

        name = f"OPT-350M, Sailor's {cluster.replace('_', ' + ')}"
        yield Case(f"{name}, blocking", "Sailor", blocking, blocking_s)
        yield Case(f"{name}, overlapped", "Sailor", data, overlapped_s)


def _qwen(folder: Path) -> Data:
    """Return the problem of an 8B model, whose layers are traced as the command line does."""
    from planner import Job, trace

    job = Job.load(folder / "job.toml")
    graph = trace(f"hf:{folder / 'config.json'}", job)
    cluster = tomllib.loads((folder / "cluster.toml").read_text())
    return {
        "graph": graph.record.model_dump(mode="json"),
        "cluster": cluster,
        "job": tomllib.loads((folder / "job.toml").read_text()),
    }


def rivals(published: Path | None) -> Iterator[Case]:
    """Yield the pairs of a public profile and a cluster of :mod:`benchmarks.rivals`."""
    from benchmarks.rivals.pairs import STRIDE, pairs

    if published is None:
        raise PipeplanError("--rivals: its profiles are public; give their folder by --published")
    for pair in pairs(published)[::STRIDE]:

        def data(pair: Any = pair) -> Data:
            problem = pair.problem()
            return {
                "graph": problem.graph.record.model_dump(mode="json"),
                "cluster": problem.cluster.model_dump(mode="json"),
                "job": problem.job.model_dump(mode="json"),
            }

        yield Case(" on ".join(pair.name), "rival pairs", data)


def tiny(published: Path | None) -> Iterator[Case]:
    """Yield the tiny problems, with the best plan that an enumeration of all knows."""
    optima = json.loads(TINY.read_text())["optima_s"]
    for number, (data, best_s) in enumerate(zip(drawn.tiny_problems(200), optima, strict=True)):
        yield Case(f"tiny {number}", "tiny", lambda data=data: data, best_s)


def orders(published: Path | None) -> Iterator[Case]:
    """Yield given stages, with the best schedule that is known of them."""
    for name, data, known_s in schedules.cases(published):
        yield Case(name, "schedules", lambda data=data: data, known_s, is_schedule=True)


def fits(published: Path | None) -> Iterator[Case]:
    """Yield problems with little memory, made so that one plan fits."""
    for number, shape in enumerate(fitting.SHAPES):
        name = f"{shape[0]} layers, {shape[1]} devices, {shape[2]} stages a device, {number}"
        yield Case(name, "memory by construction", lambda s=shape, n=number: fitting.problem(*s, n))


def _to_rule(number: int) -> tuple[Data, list[str], list[str]]:
    """Return a problem with GPT-2 small, its nodes and its layers."""
    cluster = ("irregular", "mixed24")[number % 2]
    row = next(row for row in TABLE["problems"] if row["cluster"] == cluster)
    nodes = ["big", "old", "ws0", "ws1"] if number % 2 == 0 else [f"h{i}" for i in range(6)]
    data = problem_of(row)
    return data, nodes, [layer["name"] for layer in data["graph"]["layers"]]


def rules(published: Path | None) -> Iterator[Case]:
    """Yield problems with a user's rules under which some plan exists."""
    for number in range(10):
        yield Case(f"rules {number}", "drawn rules", lambda number=number: _drawn_rules(number))


def _drawn_rules(number: int) -> Data:
    """Return a problem with two to four rules, which a plan on one or two devices keeps."""
    rng = random.Random(f"rules {number}")
    data, nodes, layers = _to_rule(number)
    first, last = rng.sample(nodes, 2)
    start = rng.randint(1, 10)
    possible: list[Data] = [
        {"place": {layers[0]: [first], layers[-1]: [last]}},
        {"most_nodes": rng.choice([2, 3])},
        {"most_price_per_hour": rng.choice([6.0, 8.0, 12.0])},
        {"together": [layers[start : start + rng.randint(3, 5)]]},
    ]
    chosen = rng.sample(possible, rng.randint(2, 4))
    return _ruled(data, {name: rule for row in chosen for name, rule in row.items()})


def conflicts(published: Path | None) -> Iterator[Case]:
    """Yield sets of rules that no plan keeps; which of them are in conflict is to be named."""
    for number in range(2 * len(CONFLICTS)):
        names = CONFLICTS[number // 2]

        def data(number: int = number, names: tuple[str, ...] = names) -> Data:
            problem, nodes, layers = _to_rule(number)
            possible = {
                "place": {layers[0]: [nodes[2]], layers[-1]: [nodes[1]]},
                "most_nodes": 1,
                "most_price_per_hour": 0.5 if "place" not in names else 1.0,
                "together": [[layers[0], *layers[3:6]], [layers[5], layers[-1]]],
            }
            return _ruled(problem, {name: possible[name] for name in names})

        yield Case(f"conflict {number}: {', '.join(names)}", "conflicts", data, conflict=names)


CONFLICTS = (
    ("place", "most_nodes"),
    ("most_price_per_hour",),
    ("place", "most_price_per_hour"),
    ("place", "together"),
    ("place", "most_nodes", "together"),
)
"""Names of the rules of each set, for each of two clusters; the last has more than one conflict."""
NARROWER: dict[str, Data] = {
    "no replicas": {"replication": False},
    "whole backwards": {"backward": "whole"},
    "no recomputation": {"recompute": False},
}
WIDER: Data = {"max_stages_per_device": 2}
SPACES = (
    "gpt2_small, irregular",
    "bert_base, irregular",
    "gpt2_xl, two_nodes_tight",
    "gpt2_small_fp16, dapple_testbed",
    "gpt2_small, two_nodes",
)


def spaces(published: Path | None) -> Iterator[Case]:
    """Yield 20 pairs of a problem and the same in a narrower space."""
    for row in (row for row in TABLE["problems"] if row["name"] in SPACES):
        name, wide = row["name"], f"{row['name']}, two stages a device"
        yield Case(wide, "spaces", lambda row=row: problem_of(row, **WIDER))
        yield Case(name, "spaces", lambda row=row: problem_of(row), wider=wide)
        for words, change in NARROWER.items():
            yield Case(
                f"{name}, {words}",
                "spaces",
                lambda row=row, change=change: problem_of(row, **change),
                wider=name,
            )


PARTS: dict[str, Callable[[Path | None], Iterator[Case]]] = {
    "corpus": corpus,
    "rivals": rivals,
    "tiny": tiny,
    "schedules": orders,
    "fits": fits,
    "rules": rules,
    "conflicts": conflicts,
    "spaces": spaces,
}
"""Problems by the name of their part on the command line."""


def freeze() -> None:
    """Trace graphs, and enumerate the tiny problems' plans, where the corpus lacks them."""
    from planner import Job, LayerGraph, trace
    from planner.tracing.sharding.record import with_splits
    from planner.tracing.trace import trace_step

    for name, row in TABLE["graphs"].items():
        path = CORPUS / "graphs" / f"{name}.json.gz"
        if "generated" in row or path.exists():
            continue
        if "splits" in row:
            job = Job.parse({"format": "pipeplan-job/1", **row["job"]}, name)
            step = trace_step(row["factory"], job)
            graph = LayerGraph.from_record(with_splits(step, row["splits"], sequence=True))
        else:
            graph = trace(
                row["factory"], Job.parse({"format": "pipeplan-job/1", **row["job"]}, name)
            )
        text = json.dumps(graph.record.model_dump(mode="json"), separators=(",", ":"))
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        print(f"{path}: {len(graph.layers)} layers")
    if not TINY.exists():
        from benchmarks.plans.oracle import optima

        TINY.write_text(json.dumps(optima(), indent=1) + "\n")
