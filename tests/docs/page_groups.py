"""Which test runs which page. A group is a file of tests, so that groups run side by side."""

from builders import ROOT
from documents import Block, blocks

DOCS = ROOT / "docs"
GROUPS = {
    "tutorial": ("tutorial.md",),
    "executor": ("executor.md", "frozen_parts.md", "unequal_microbatches.md"),
    "plans": ("plans.md", "synchronisation.md"),
    "running_plans": ("adopt.md", "replan.md"),
    "readme": ("../README.md",),
    "others": (
        "cli_conventions.md",
        "classic_planners.md",
        "cost_model.md",
        "experts.md",
        "export.md",
        "how_plans_are_found.md",
        "index.md",
        "models_and_clusters.md",
        "proofs.md",
        "runtimes.md",
    ),
}
ELSEWHERE = {
    "own_constraints.md": "tests/solver/test_own_constraints.py",
    "sweep.md": "tests/sweeping/test_sweep_docs.py",
}
"""Pages whose files or results a test of their subject knows."""
REASONS = (
    *("needs several machines", "needs a GPU", "needs files of your own"),
    "needs a checkout",
    *("takes minutes", "changes settings"),
)
"""Why a block may be shown and not run; a reason begins with one of these."""
MOST_NOT_RUN = 12


def steps(page: str) -> list[Block]:
    """The blocks of a page that a reader runs or writes to a file."""
    return [block for block in blocks(DOCS / page) if block.is_step]
