"""Plans of groups against the best even layout: claims follow from rows, rows from a file."""

from pathlib import Path

import pytest

from benchmarks.groups.__main__ import grid_claims, grid_rows, report
from benchmarks.groups.__main__ import parser as command_line
from benchmarks.groups.against_grid import Layout, PairRow, best_even, problems_of
from benchmarks.groups.cases import CLUSTERS, MODELS, Graphs, Machines, Model, Node, pairs
from planner import LayerGraph, Problem


def layout(time_s: float) -> Layout:
    return Layout(
        degree=2,
        replicas=(1, 2),
        samples=4,
        shares_state=True,
        recomputed=0,
        schedule="1f1b",
        time_s=time_s,
    )


def row(cluster: str, grid_s: float | None, ours_s: float | None, *, is_even: bool) -> PairRow:
    return PairRow(
        model="llama2_7b",
        cluster=cluster,
        is_even=is_even,
        devices=8,
        time_limit_s=20.0,
        grid=None if grid_s is None else layout(grid_s),
        ours=None if ours_s is None else layout(ours_s),
        gap=None,
        cpu_s=1.0,
    )


def test_claims_are_means_of_uneven_and_even_clusters_apart() -> None:
    """Where one side finds nothing there is no ratio; a plan slower by one in a million counts."""
    rows = [
        row("a", 4.0, 1.0, is_even=False),
        row("b", 1.0, 1.0, is_even=False),
        row("c", None, 1.0, is_even=False),
        row("d", 1.0, 1.000001, is_even=True),
    ]
    uneven, even, never = grid_claims(rows, 20.0)
    assert (uneven.figure, uneven.reached) == (2.0, True)
    assert even.figure == pytest.approx(1.0, rel=1e-5)
    assert even.reached is None
    assert (never.figure, never.bar, never.reached) == (2, 3, False)


def test_every_pair_comes_once_and_the_first_have_every_cluster_and_model() -> None:
    every = list(pairs())
    assert len(set(every)) == len(every) == len(MODELS) * len(CLUSTERS) == 32
    assert {machines for _, machines in every[:8]} == set(CLUSTERS)
    assert {model for model, _ in every[:8]} == set(MODELS)
    assert sum(machines.is_even for machines in CLUSTERS) == 4


def test_the_page_of_what_is_kept_names_what_is_missing(tmp_path: Path) -> None:
    found = row(CLUSTERS[0].name, 2.0, 1.0, is_even=False)
    (tmp_path / "pairs.jsonl").write_text(found.model_dump_json() + "\n")
    assert grid_rows(tmp_path, 20.0, plans=False) == [found]
    assert grid_rows(tmp_path, 5.0, plans=False) == []
    arguments = command_line().parse_args(["--keep", str(tmp_path), "--only-kept"])
    page = report(arguments, ["grid", "gaps"])
    assert "| 2 x 2 x 1 to 2, 4, ZeRO | 1f1b | 2.000 |" in page
    assert "Not run (31 of 32 pairs)" in page
    assert "Not run: llama2_7b on one node" in page


class SmallGraphs(Graphs):
    """A small transformer in place of a model."""

    def of(self, model: Model, samples: int) -> LayerGraph:
        from transformers_by_hand import transformer

        record = transformer(4, degrees=(2,)).record
        return LayerGraph.from_record(
            record.model_copy(update={"samples_per_microbatch": samples, "precision": "float16"})
        )


def test_the_best_even_layout_is_the_fastest_of_all_settings() -> None:
    """Equal work whatever the size: the fewest samples a microbatch have the most microbatches."""
    machines = Machines("by-hand", (Node(4, "A100-80GB", "NVLink3", "InfiniBand-HDR"),))
    model = Model("models.by:hand", (16, 32))
    problems = list(problems_of(model, machines, SmallGraphs(None)))
    assert [setting for setting, _ in problems] == [
        (16, True),
        (32, True),
        (16, False),
        (32, False),
    ]
    best, problem = best_even(problems)
    assert best is not None
    alone = [best_even([pair])[0] for pair in problems]
    assert best.time_s == min(one.time_s for one in alone if one is not None)
    assert isinstance(problem, Problem)
    assert problem.job.samples_per_microbatch == best.samples
