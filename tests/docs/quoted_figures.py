"""Where the figures come from that README quotes from benchmarks.

A sentence that links to a page of ``benchmarks/`` or names the command of a benchmark, and the
table after it, may only have figures that a row of :data:`QUOTED` finds. In its ``text``, a regular
expression of the words on the page, each ``#`` is a figure; ``figures`` gives them, in order, from
the raw rows in ``benchmarks/results``. They are compared at the digits that the page has. None
stands for a cell without a figure. A row may also find figures of sentences without a link.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from builders import ROOT
from reports import column

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
    figures: Callable[[], Sequence[float | None]]

    @property
    def pattern(self) -> str:
        """The regular expression with a group for each figure."""
        return self.text.replace("#", FIGURE)


def gaps_by_cluster() -> list[float]:
    """Return the limit and the median gaps by group of problems, from PLANS.md's table."""
    page = (ROOT / "benchmarks/PLANS.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page]
    heads = next(row for row in cells if "gap, median" in row)
    table = [dict(zip(heads, row, strict=False)) for row in cells if len(row) == len(heads)]
    ours = {row["group"]: row for row in table if row["build"] == "this build"}
    gaps = {group: float(row["gap, median"].removesuffix("%")) for group, row in ours.items()}
    limit_s, gpus = float(ours["all"]["CPU s"]), 64
    large, slow = gaps[f"{gpus} GPUs"], gaps["slow network"]
    return [limit_s, gaps["irregular"], gaps["even"], large, gpus, slow]


def rivals() -> list[float]:
    """Return pairs, mean and extremes of the best rival's time, and how often it is faster."""
    found = column("rivals", "profiles", "rival / ours")
    faster = sum(ratio < 1 for ratio in found)
    return [len(found), statistics.geometric_mean(found), min(found), max(found), faster]


def trained() -> list[float]:
    """Return plans, extreme errors and their median of two ranks, then without it of four."""
    two, four = (
        list(map(abs, column("prediction", f"trained, {ranks} ranks", "error %")))
        for ranks in ("two", "four")
    )
    middle = statistics.median(two)
    return [len(two), min(two), max(two), middle, len(four), min(four), max(four)]


def to_the_loss(strategy: str) -> list[float | None]:
    """Return the speed-up to the loss where one of eight real pipelines is slow; None: never."""
    name = "to the loss, against overlapped"
    return column("sync", "loopback", name, setting="one_4x_slow", strategy=strategy)


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

RIVALS = (
    "On # pairs of a public profile and a cluster, the best baseline of all takes # times as "
    "long as Pipeplan in the geometric mean [(]# to #[)] and is faster on #"
)


QUOTED = (
    Quoted(
        "README.md",
        "predicted times of # plans for two ranks were # to # % off .*median # %., and of # for "
        "four .* # to # %",
        trained,
    ),
    Quoted(
        "README.md",
        "Median gaps of whole plans after # CPU seconds are # % on irregular clusters, # % on "
        "even ones, # % on # GPUs and # % on slow networks",
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
)
