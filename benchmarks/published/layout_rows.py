"""The published layouts, from the publications' own tables, and rows of a reader's own file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.published.layout_calibration import MOST_TO_CALIBRATE
from benchmarks.published.layouts_3d import Figures, Layout, Machine
from benchmarks.published.megatron_gpt import Gpt
from planner.errors import PipeplanError, shorten
from planner.plan.runtime_rules import RULES
from planner.records.document import read_text

PREQUEL = (
    "BigScience 2022, github.com/bigscience-workshop/bigscience, "
    "train/tr11-176B-ml/chronicles-prequel.md: Megatron-DeepSpeed on 384 A100 (48 nodes)"
)
NARAYANAN = (
    "Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using "
    "Megatron-LM (SC), table 1; seconds from its equation 3, microbatches and chunks from the "
    "authors' scripts"
)
KORTHIKANTI = (
    "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, "
    "table 5, full recomputation, and selective with sequence parallelism"
)
OF_INFINIBAND = 0.8
"""Share of an InfiniBand card's bandwidth that NCCL reaches."""
OF_OMNI_PATH_GB_PER_S = 40.5 / 8
"""What NCCL reaches over one of the cards, of 12.5: an all-reduce of 4 GB among 32 A100 of that
machine (the same repository, experiments/bandwidth/all_reduce_bench-a100-n4.txt)."""
BLOCKED_LAUNCH_US = 30.0
"""Host time of an operation whose launch blocks, as all did there: 15 µs that torch and Python take
(``python -m benchmarks.published.launches`` on a server processor), and as much for the launch and
for the wait until the host sees that the kernel has ended (a guess)."""
JEAN_ZAY = Machine(
    "48 nodes with 4 x 100 Gb/s Omni-Path, Megatron-DeepSpeed with ZeRO-1",
    4 * OF_OMNI_PATH_GB_PER_S,
    RULES["deepspeed"],
    zero=True,
    figures=Figures(host_us=BLOCKED_LAUNCH_US),
    fills=True,
)
SELENE = Machine(
    "nodes with 8 x 200 Gb/s InfiniBand, Megatron-LM",
    OF_INFINIBAND * 200.0,
    RULES["megatron-blocking"].model_copy(update={"group_messages": "parts"}),
)

# Blocks, hidden, heads, DP, TP, PP, microbatch, batch, GB, seconds (None: out of memory). Of 25 and
# 26 February; before, the machine was set up otherwise.
_PREQUEL: tuple[tuple[int, int, int, int, int, int, int, int, float | None, float | None], ...] = (
    (72, 14336, 64, 8, 8, 6, 4, 2048, 55, 114.11),
    (72, 14336, 64, 8, 8, 6, 4, 1568, 56, 113.01),
    (72, 14336, 64, 4, 8, 12, 4, 1568, None, 92.75),
    (72, 14336, 64, 4, 8, 12, 4, 2048, 49, 117.07),
    (72, 14336, 64, 4, 8, 12, 2, 1568, None, 99.93),
    (72, 14336, 64, 4, 8, 12, 2, 2048, None, 128.82),
    (72, 14336, 64, 6, 8, 8, 4, 2016, 52, 113.16),
    (72, 14336, 64, 12, 8, 4, 2, 2016, 53, 125.52),
    (72, 14336, 64, 12, 8, 4, 4, 2016, 59, 114.81),
    (72, 14336, 64, 24, 8, 2, 1, 2016, 65, 145.45),
    (72, 14336, 64, 24, 8, 2, 2, 2016, 76, 136.13),
    (72, 14336, 64, 48, 8, 1, 1, 2016, None, None),
    (72, 14336, 64, 8, 4, 12, 4, 2048, 60, 111.89),
    (72, 14336, 64, 8, 4, 12, 2, 2048, 44, 110.48),
    (72, 14336, 64, 16, 4, 6, 4, 2048, 75, 117.11),
    (72, 14336, 64, 16, 4, 6, 2, 2048, 57, 111.71),
    (72, 14336, 64, 16, 2, 12, 2, 2048, 63, 112.50),
    (72, 14336, 64, 32, 2, 6, 2, 2048, None, None),
    (72, 14336, 64, 32, 2, 6, 1, 2048, None, None),
    (72, 14336, 64, 8, 2, 24, 1, 2048, 44, 119.53),
    (72, 14336, 64, 8, 2, 24, 2, 2048, 53, 122.75),
    (72, 14336, 64, 4, 4, 24, 1, 2048, None, 130.60),
    (96, 12288, 64, 8, 1, 48, 1, 2048, 58, 142.17),
    (84, 13312, 64, 8, 4, 12, 2, 2048, None, 103.82),
    (84, 13312, 64, 8, 4, 12, 4, 2048, None, 113.21),
)

# Blocks, hidden, heads, TP, PP, GPUs, batch, microbatch, chunks, teraFLOP/s a GPU.
_NARAYANAN = (
    (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    (30, 3072, 32, 2, 1, 64, 512, 16, 1, 138),
    (36, 4096, 32, 4, 1, 128, 512, 16, 1, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 8, 1, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 4, 1, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 2, 3, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 2, 2, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 1, 2, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 1, 3, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 1, 1, 163),
)

# Blocks, hidden, heads, TP, PP, batch, microbatch, chunks, seconds recomputed in full, selectively.
_KORTHIKANTI = (
    (48, 6144, 64, 8, 1, 4, 4, 1, 1.42, 1.10),
    (96, 12288, 96, 8, 8, 64, 1, 3, 18.13, 13.75),
    (105, 20480, 128, 8, 35, 280, 1, 3, 49.05, 37.83),
    (128, 25600, 160, 8, 64, 512, 1, 1, 94.42, 71.49),
)
SEQUENCE, PREQUEL_VOCABULARY, MEGATRON_VOCABULARY = 2048, 250_880, 51_200
MACHINES: Mapping[str, tuple[Machine, int]] = {
    "megatron-deepspeed": (JEAN_ZAY, PREQUEL_VOCABULARY),
    "megatron-lm": (SELENE, MEGATRON_VOCABULARY),
}
"""Machines by the name of their software, with the size of the vocabulary."""


def layouts() -> Iterator[Layout]:
    """Yield all rows; of a source the first of each microbatch size calibrates, three at most."""
    seen: dict[str, set[int]] = {}
    for row in _layouts():
        sizes = seen.setdefault(row.source, set())
        is_first = row.measured_s is not None and row.gpt.samples not in sizes
        calibrates = is_first and len(sizes) < MOST_TO_CALIBRATE
        sizes.update([row.gpt.samples] if is_first else [])
        yield replace(row, calibrates=calibrates)


def _layouts() -> Iterator[Layout]:
    for blocks, hidden, heads, dp, tp, pp, samples, batch, gb, seconds in _PREQUEL:
        gpt = Gpt(blocks, hidden, heads, SEQUENCE, PREQUEL_VOCABULARY, samples, tp)
        batch -= batch % (dp * samples)
        is_out = seconds is None
        yield Layout(JEAN_ZAY, PREQUEL, gpt, dp, pp, batch, seconds, gb, out_of_memory=is_out)
    for blocks, hidden, heads, tp, pp, gpus, batch, samples, chunks, rate in _NARAYANAN:
        gpt = Gpt(blocks, hidden, heads, SEQUENCE, MEGATRON_VOCABULARY, samples, tp)
        seconds = batch * iteration_flops(gpt) / (gpus * rate * 1e12)
        yield Layout(SELENE, NARAYANAN, gpt, gpus // tp // pp, pp, batch, seconds, chunks=chunks)
    for blocks, hidden, heads, tp, pp, batch, samples, chunks, full_s, selective_s in _KORTHIKANTI:
        gpt = Gpt(blocks, hidden, heads, SEQUENCE, MEGATRON_VOCABULARY, samples, tp)
        yield Layout(SELENE, KORTHIKANTI, gpt, 1, pp, batch, full_s, chunks=chunks)
        gpt = replace(gpt, sequence_parallel=True, selective=True)
        yield Layout(SELENE, KORTHIKANTI, gpt, 1, pp, batch, selective_s, chunks=chunks)


def iteration_flops(gpt: Gpt) -> float:
    """Return the FLOPs of a sample with recomputation: Narayanan et al. 2021, equation 3."""
    hidden, sequence, blocks = gpt.hidden, gpt.sequence, gpt.blocks
    head = gpt.vocabulary / (16 * blocks * hidden)
    return 96 * sequence * blocks * hidden**2 * (1 + sequence / (6 * hidden) + head)


# --- a reader's own rows --------------------------------------------------------------------------

_SIZES = ("blocks", "hidden", "heads", "dp", "tp", "pp", "microbatch", "batch")
COLUMNS = (*_SIZES, "chunks", "seconds", "gb", "calibrates")
OUT_OF_MEMORY = "oom"


def rows_of_file(path: Path, machine: str) -> list[Layout]:
    """Read layouts of a CSV file: a row each, with the names of :data:`COLUMNS` in the first.

    ``seconds`` are those measured, ``oom`` where it ran out of memory, or left out; ``gb`` and
    ``chunks`` may be left out too. A row calibrates where ``calibrates`` is not empty.

    Args:
        path: of the file.
        machine: a name of :data:`MACHINES`.

    Raises:
        PipeplanError: naming the line and the column that is wrong.
    """
    found = csv.DictReader(read_text(path).splitlines())
    named = tuple(found.fieldnames or ())
    wrong = [*(set(_SIZES) - set(named)), *(set(named) - set(COLUMNS))]
    if wrong:
        raise PipeplanError(
            f"{path}: columns {', '.join(map(str, sorted(wrong)))} are missing or unknown; the "
            f"first line has {', '.join(COLUMNS)}, of which those from chunks on may be left out"
        )
    return [_row(row, f"{path}: line {found.line_num}", machine) for row in found]


def _row(row: Mapping[str, str | None], where: str, machine: str) -> Layout:
    used, vocabulary = MACHINES[machine]
    sizes = [int(_number(row, name, where)) for name in _SIZES]
    blocks, hidden, heads, dp, tp, pp, samples, batch = sizes
    chunks = int(_number(row, "chunks", where)) if row.get("chunks") else 1
    for count, total, words in (
        (dp * samples, batch, "dp x microbatch does not divide batch"),
        (tp, heads, "tp does not divide heads"),
        (heads, hidden, "heads do not divide hidden"),
        (1, blocks // (pp * chunks), "there are fewer blocks than stages"),
    ):
        if total % count or not total:
            raise PipeplanError(f"{where}: {words}; correct one of them")
    seconds, is_out = row.get("seconds"), row.get("seconds") == OUT_OF_MEMORY
    return Layout(
        used,
        where.partition(": line")[0],
        Gpt(blocks, hidden, heads, SEQUENCE, vocabulary, samples, tp),
        dp,
        pp,
        batch,
        _number(row, "seconds", where) if seconds and not is_out else None,
        _number(row, "gb", where) if row.get("gb") else None,
        chunks,
        out_of_memory=is_out,
        calibrates=bool(row.get("calibrates")),
    )


def _number(row: Mapping[str, str | None], name: str, where: str) -> float:
    text = row.get(name) or ""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    whole = name in ("seconds", "gb") or number.is_integer()
    if not whole or not 0 < number < 1e9:
        raise PipeplanError(
            f"{where}: {name}: {shorten(text)}: expected a number above 0; correct it"
        )
    return number
