"""Plans of zoo models on the sample clusters, and what their certificates prove."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import ROOT
from planner import Cluster, Job, Problem, solve, trace
from planner.verification.proof import prove

MODELS = (
    *("models.gpt:gpt2_small", "models.bert:bert_base", "models.vit:vit_base_16"),
    *("models.resnet:resnet50", "models.vgg:vgg16", "models.unet:unet", "models.gnmt:gnmt"),
)
CLUSTERS = ("single_node", "irregular", "two_nodes", "dapple_testbed")
SHORT_MODELS = ("models.gpt:gpt2_small", "models.resnet:resnet50")
MICROBATCHES = 16
ENOUGH = 1 - 1e-6
"""Share of a bound that its certificate has to prove."""
COLUMNS = (
    *("model", "cluster", "iteration ms", "bound ms", "certified ms", "kind", "alone", "gap"),
    *("certified gap", "check s"),
)


@dataclass(frozen=True)
class ProofRow:
    """A plan and what is proved of its bound.

    Attributes:
        model, cluster: planned for.
        time_s, bound_s: of the plan.
        certified_s: what its certificate proves; 0 if nothing.
        kind: of the certificate.
        check_s: how long checking it took.
    """

    model: str
    cluster: str
    time_s: float
    bound_s: float
    certified_s: float
    kind: str
    check_s: float

    @property
    def is_alone(self) -> bool:
        """Whether the certificate alone proves the bound."""
        return self.certified_s >= ENOUGH * self.bound_s

    def cells(self) -> list[object]:
        """Return the row of a table."""
        certified_gap = self.time_s / self.certified_s - 1 if self.certified_s else None
        return [
            self.model.partition(":")[2],
            self.cluster,
            *(f"{seconds * 1e3:.3f}" for seconds in (self.time_s, self.bound_s, self.certified_s)),
            self.kind,
            "yes" if self.is_alone else "no",
            f"{self.time_s / self.bound_s - 1:.2%}",
            "-" if certified_gap is None else f"{certified_gap:.2%}",
            f"{self.check_s:.2f}",
        ]


def proof_rows(
    models: Sequence[str], clusters: Sequence[str], time_limit_s: float
) -> Iterator[ProofRow]:
    """Yield a row for each model on each cluster, as it is done.

    Args:
        models: of the zoo.
        clusters: sample clusters, by the names of their files.
        time_limit_s: of each search.
    """
    job = Job(microbatches=MICROBATCHES)
    for model in models:
        graph = trace(model, job)
        for name in clusters:
            cluster = Cluster.load(ROOT / f"examples/clusters/{name}.toml")
            yield _row(model, name, Problem(graph, cluster, job), time_limit_s)


def _row(model: str, name: str, problem: Problem, time_limit_s: float) -> ProofRow:
    plan = solve(problem, time_limit_s=time_limit_s).plan
    begin_s = time.perf_counter()
    report = prove(plan)
    check_s = time.perf_counter() - begin_s
    certificate = None if report.problems else report.certificate
    return ProofRow(
        model,
        name,
        plan.predicted.iteration_time_s,
        plan.predicted.lower_bound_s,
        0.0 if certificate is None else certificate.bound_s,
        "none" if certificate is None else certificate.argument.kind,
        check_s,
    )
