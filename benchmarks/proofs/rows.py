"""Plans of zoo models on the sample clusters, and what their certificates prove."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from benchmarks import ROOT
from planner import Cluster, Job, Problem, solve, trace
from planner.verification.proof import prove

MODELS = (
    *("models.gpt:gpt2_small", "models.gpt:gpt2_xl", "models.llama:llama2_7b"),
    *("models.bert:bert_base", "models.vit:vit_base_16", "models.gnmt:gnmt"),
    *("models.resnet:resnet50", "models.vgg:vgg16", "models.vgg:vgg19", "models.unet:unet"),
)
CLUSTERS = ("single_node", "irregular", "two_nodes", "dapple_testbed")
SHORT_MODELS = ("models.gpt:gpt2_small", "models.resnet:resnet50")
"""Models of the short form, and those with several stages a device."""
SHORT_CLUSTERS_OF_SEVERAL = CLUSTERS[:2]
MICROBATCHES = 16
ENOUGH = 1 - 1e-6
"""Share of a bound that its certificate has to prove."""
COLUMNS = (
    *("model", "cluster", "stages a device", "iteration ms", "bound ms", "certified ms", "kind"),
    *("alone", "gap", "certified gap", "check s"),
)


@dataclass(frozen=True)
class ProofCase:
    """What is planned.

    Attributes:
        model: of the zoo.
        cluster: a sample cluster, by the name of its file.
        stages_a_device: at most.
    """

    model: str
    cluster: str
    stages_a_device: int = 1


def all_cases() -> tuple[ProofCase, ...]:
    """Return every model on every cluster, and some with two stages a device."""
    single = (ProofCase(*pair) for pair in product(MODELS, CLUSTERS))
    return (*single, *(ProofCase(*pair, 2) for pair in product(SHORT_MODELS, CLUSTERS)))


def short_cases() -> tuple[ProofCase, ...]:
    """Return those of few models."""
    single = (ProofCase(*pair) for pair in product(SHORT_MODELS, CLUSTERS))
    several = product(SHORT_MODELS, SHORT_CLUSTERS_OF_SEVERAL)
    return (*single, *(ProofCase(*pair, 2) for pair in several))


@dataclass(frozen=True)
class ProofRow:
    """A plan and what is proved of its bound.

    Attributes:
        case: what was planned.
        time_s, bound_s: of the plan.
        certified_s: what its certificate proves; 0 if nothing.
        kind: of the certificate.
        check_s: seconds of one core that checking it took: it has no threads, and so the figure
            does not depend on what else the machine does.
    """

    case: ProofCase
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
            self.case.model.partition(":")[2],
            self.case.cluster,
            self.case.stages_a_device,
            *(f"{seconds * 1e3:.3f}" for seconds in (self.time_s, self.bound_s, self.certified_s)),
            self.kind,
            "yes" if self.is_alone else "no",
            f"{self.time_s / self.bound_s - 1:.2%}",
            "-" if certified_gap is None else f"{certified_gap:.2%}",
            f"{self.check_s:.2f}",
        ]


def proof_rows(cases: Iterable[ProofCase], time_limit_s: float) -> Iterator[ProofRow]:
    """Yield a row for each case, as it is done.

    Args:
        cases: to plan.
        time_limit_s: of each search.
    """
    traced = cache(partial(trace, job=Job(microbatches=MICROBATCHES)))
    for case in cases:
        job = Job(microbatches=MICROBATCHES, max_stages_per_device=case.stages_a_device)
        cluster = Cluster.load(ROOT / f"examples/clusters/{case.cluster}.toml")
        yield _row(case, Problem(traced(case.model), cluster, job), time_limit_s)


def _row(case: ProofCase, problem: Problem, time_limit_s: float) -> ProofRow:
    plan = solve(problem, time_limit_s=time_limit_s).plan
    begin_s = time.process_time()
    report = prove(plan)
    check_s = time.process_time() - begin_s
    certificate = None if report.problems else report.certificate
    return ProofRow(
        case,
        plan.predicted.iteration_time_s,
        plan.predicted.lower_bound_s,
        0.0 if certificate is None else certificate.bound_s,
        "none" if certificate is None else certificate.argument.kind,
        check_s,
    )
