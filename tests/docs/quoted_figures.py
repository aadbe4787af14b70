"""Where the figures come from that README quotes from benchmarks.

A sentence that links to a report or names the command of a benchmark, and the table after it, may
only have figures that a row of :data:`QUOTED` finds. In its ``text``, a regular expression of the
words on the page, each ``#`` is a figure; ``figures`` gives them, in order, from today's reports.
They are compared at the digits that the page has. None stands for a cell without a figure, a bool
for a group of words that stand there if, and only if, something holds. A row may also find figures
of sentences without a link.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from reports import report

FIGURE = r"([-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)"


@dataclass(frozen=True)
class Quoted:
    """Figures of one page.

    Attributes:
        page: from the root of the repository.
        text: regular expression, with ``#`` for each figure.
        figures: what the reports have for each group.
    """

    page: str
    text: str
    figures: Callable[[], Sequence[float | bool | None]]

    @property
    def pattern(self) -> str:
        """The regular expression with a group for each figure."""
        return self.text.replace("#", FIGURE)


def extremes(*columns: Sequence[float]) -> list[float]:
    """Return the least and the largest figure."""
    values = [value for column in columns for value in column]
    return [min(values), max(values)]


def only(values: Sequence[float]) -> float | None:
    """Return the figure of the one row that was asked for, None without it."""
    return values[0] if len(values) == 1 else None


def absolute(values: Sequence[float]) -> list[float]:
    """Return errors without their signs."""
    return [abs(value) for value in values]


# --- the testbed ----------------------------------------------------------------------------------


def testbed_row(cluster: str) -> list[float | None]:
    """Return a row of README's table: measured times of four planners, and our prediction."""
    rows = [("measured ms", p) for p in ("even", "pipedream", "spp", "pipeplan")]
    return [
        only(
            report("EXECUTOR").column(
                "Predicted against measured",
                column,
                {"cluster": cluster, "model": "gpt", "planner": planner},
            )
        )
        for column, planner in (*rows, ("predicted ms", "pipeplan"))
    ]


def freedoms() -> list[float]:
    """Return the bar of all plans' losses and gradients, and the worst error of their times."""
    rows = partial(report("EXECUTOR").column, "Everything at once", where={"precision": "float32"})
    bar = report("EXECUTOR").said(r"Bars: (1e-\d+) in float32")[0]
    worst = max(max(rows(name)) for name in ("loss", "gradients", "whole training"))
    errors = report("EXECUTOR").column("Everything at once", "error", {"cluster": r"\w+"})
    return [bar if worst <= bar else worst, max(absolute(errors))]


# --- partitions, schedules and rivals -------------------------------------------------------------


def gaps(clusters: str) -> list[float]:
    """Return the least and the largest gap of whole plans on some of the sample clusters."""
    return extremes(report("SCHEDULE").column("Whole plans: traced", "gap", {"cluster": clusters}))


def gpus(cluster: str) -> float:
    """Return the number of devices of a sample cluster."""
    return report("SCHEDULE").column("Whole plans: traced", "devices", {"cluster": cluster})[0]


def gaps_by_cluster() -> list[float]:
    """Return the gaps of whole plans on small, irregular or large, and slow clusters."""
    irregular = gaps("irregular|eight_nodes")
    return [*gaps("single_node|two_nodes"), *irregular, gpus("eight_nodes"), *gaps("dapple.*")]


def rivals() -> list[float | bool]:
    """Return pairs, mean and extremes of the best rival's time, then the same without its stages.

    Ours starts from the rivals' stages; the last two figures are of searches without them: the
    mean, and on how many pairs a rival is faster.
    """
    rows = partial(report("RIVALS").column, "Pipeplan against")
    found, rival_ms = rows("rival / ours"), rows("rival, ms")
    alone = [a / b for a, b in zip(rival_ms, rows("ours without their stages, ms"), strict=True)]
    counts = report("RIVALS").said(r"^(\d+) pairs of a public profile")
    not_slower = report("RIVALS").said(r"no rival is faster than: (\d+) of \d+")
    means = [statistics.geometric_mean(row) for row in (found, alone)]
    return [*counts, means[0], *extremes(found), means[1], counts[0] - not_slower[0]]


# --- predictions ----------------------------------------------------------------------------------


def trained() -> list[float]:
    """Return plans, extreme errors and their median of two ranks, then without it of four."""
    two, four = (
        absolute(report("PREDICTION").column(heading, "error"))
        for heading in ("Two ranks", "Four ranks on two cores")
    )
    return [len(two), *extremes(two), statistics.median(two), len(four), *extremes(four)]


def even_layouts() -> list[float | bool]:
    """Return how much longer the best even layouts take, and over how many pairs."""
    told = report("GROUPS")
    ratio = r"geometric mean, {} clusters: ([\d.]+)"
    means = [told.said(ratio.format(kind))[0] for kind in ("uneven", "even")]
    return [*means, *told.said(r"not slower than the best even layout: \d+ of (\d+)")]


def to_the_loss(strategy: str) -> list[float | None]:
    """Return the speed-up to the loss where one of eight real pipelines is slow; None: never."""
    where = {"setting": "one_4x_slow", "strategy": f"`{strategy}`"}
    name = "to the loss, against overlapped"
    return [only(report("SYNC").column("Eight real pipelines", name, where, part=r"^([\d.]+)"))]


PAPER_ROWS = {
    "sdpipe": "semi_decentralized",
    "prague": "partial_all_reduce",
    "ps_plus": "eager_parameter_server",
    "cross_iteration": "cross_iteration",
    "dear": "decoupled",
    "hetpipe": "wave_synchronous",
    "ad_psgd": "ad_psgd",
}
"""The strategies of README's table of papers, by the name in its command."""


# --- the pages ------------------------------------------------------------------------------------

CELL = "[*]*#[*]*"
TESTBED_ROW = rf"{CELL} [|] {CELL} [|] (?:{CELL}|-) [|] {CELL} [|] #"
RIVALS = (
    "On # pairs of a public profile and a cluster, the best baseline of all takes # times as "
    "long as Pipeplan in the geometric mean [(]# to #[)][.;] .*without .* # times .* faster on #"
)


QUOTED = (
    *(
        Quoted(
            "README.md",
            rf"[|] {name} [|] {TESTBED_ROW} [|]",
            partial(testbed_row, name.replace(" ", "_")),
        )
        for name in ("irregular", "slow leg", "two nodes", "ring", "shared uplink", "uniform")
    ),
    Quoted(
        "README.md",
        "predicted times of # plans for two ranks were # to # % off .*median # %., and of # for "
        "four .* # to # %",
        trained,
    ),
    Quoted("README.md", "equal a single process to #, and are predicted within # %", freedoms),
    Quoted(
        "README.md",
        "Gaps of whole plans are # to # % on one node and two, # to # % on irregular clusters and "
        "# GPUs, # to # % on two servers with a slow network",
        gaps_by_cluster,
    ),
    Quoted("README.md", RIVALS, rivals),
    *(
        Quoted(
            "README.md",
            rf"[|] `--sync {name}` [|] `[^`]+` [|] (?:#|-) [|]",
            partial(to_the_loss, strategy),
        )
        for name, strategy in PAPER_ROWS.items()
    ),
    Quoted(
        "README.md",
        "takes # times as long as Pipeplan's plan on uneven clusters in the geometric mean and # "
        "times on even ones, over # pairs",
        even_layouts,
    ),
)
