"""The page of a published run, on files of the public data's structure with figures of our own."""

import json
from pathlib import Path

import pytest
from builders import ROOT
from documents import run_page

from benchmarks.published import sailor

pytestmark = pytest.mark.extensive
LAYERS = 26


def sailor_checkout(folder: Path) -> None:
    """Write a layout of 12 and 14 layers of 3 ms, with four replicas a stage."""
    times = {str(index): [0.001, 0.002, 0.0] for index in range(LAYERS)}
    sizes = {"params_bytes": 400, "act_output_bytes": 80, "act_mem_bytes": 80}
    link = {"4": [[0.0, 0.0, 40.0], 4e10]}
    replicas = [[[["GH-96", 4, "zone"]], 4]] * 4
    pipeline = {
        "num_stages": 2,
        "layers_per_stage": [list(range(12)), list(range(12, LAYERS))],
        "tmp_per_stage": [replicas, replicas],
        "dp": [4, 4],
    }
    layout = {"pipeline_list": [pipeline], "mbs": 2, "gbs": 16, "real": 0.7, "max_mem": 1}
    files: dict[Path, object] = {
        sailor.PROFILES: {"OPT-350": {"GH-96": {"2": {"4": times}, "8": {"4": times}}}},
        sailor.PLANNER / "llm_info.json": {"OPT-350": {"4": dict.fromkeys(times, sizes)}},
        sailor.LINKS: {"inter": {"GH-96": link}, "intra": {"GH-96": link}},
        sailor.VALIDATION / "clariden/OPT-350/N8/plan_config_N8_D4.json": layout,
    }
    for path, data in files.items():
        target = folder / "sailor" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(data))


def test_the_page_of_a_published_run_does_what_it_shows(tmp_path: Path) -> None:
    sailor_checkout(tmp_path)
    printed = run_page(ROOT / "docs" / "published_run.md", tmp_path)
    assert printed[1] == "4 replicas, measured 0.700 s\n"
    # 64 microbatches on 4 replicas; the slower stage has 14 layers of 3 ms.
    assert printed[-1] == f"predicted {12 * 0.003 + 16 * 14 * 0.003:.3f} s\n"
