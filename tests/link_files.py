"""Files in the forms that topology tools and nccl-tests print, of machines made up here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

LEGEND = """
Legend:

  X    = Self
  NV#  = GPU0 and GPU1 in words, which are no table
"""


def topology(
    rows: Sequence[str],
    numa: Sequence[str] = (),
    cards: Sequence[str] = (),
    separator: str = "\t",
    more: str = "",
) -> str:
    """A table from the classes of each GPU and card, in words, such as ``X NV4 SYS``.

    Args:
        rows: of GPUs, then of cards.
        numa: node of each GPU; 0 unless told.
        cards: what the last rows and columns are called.
        separator: tabs as printed, or spaces as they become when copied.
        more: lines behind the legend.
    """
    gpus = [f"GPU{number}" for number in range(len(rows) - len(cards))]
    names = [*gpus, *cards]
    lines = [separator.join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        node = numa[number] if numa and name in gpus else "0"
        affinity = ["0-15,32-47", node, "", "N/A"] if name in gpus else []
        lines.append(separator.join([name, *row.split(), *affinity]))
    return "\n".join(lines) + "\n" + LEGEND + more


def rocm_topology(kinds: Sequence[str], weights: Sequence[str], numa: Sequence[str]) -> str:
    """The tables of ``rocm-smi --showtopo``, from rows in words, such as ``0 XGMI PCIE``."""
    columns = " ".join(f"GPU{number}" for number in range(len(kinds)))
    parts = ["", f"{' ROCm System Management Interface ':=^90}"]
    for title, rows in (
        ("Weight between two GPUs", weights),
        ("Hops between two GPUs", weights),
        ("Link Type between two GPUs", kinds),
    ):
        lines = [f"GPU{number}   {row}" for number, row in enumerate(rows)]
        parts += [f"{f' {title} ':=^90}", f"       {columns}", *lines, ""]
    parts.append(f"{' Numa Nodes ':=^90}")
    for number, node in enumerate(numa):
        for what in ("Node", "Affinity"):
            parts.append(f"GPU[{number}]\t\t: (Topology) Numa {what}: {node}")
    return "\n".join([*parts, f"{' End of ROCm SMI Log ':=^90}", ""])


def nccl_log(
    ranks: Sequence[tuple[str, int, str]],
    seconds: Callable[[int], float],
    sizes: Sequence[int],
    bus_factor: float = 1.0,
    test: str | None = "all_reduce",
    mark: str = "#",
) -> str:
    """A log of a test whose messages take the given time.

    Args:
        ranks: host, device number and name.
        seconds: of a size in bytes, with buffers apart; the same buffers take twice as long.
        sizes: of rows.
        bus_factor: bandwidth of the bus over that of the algorithm.
        test: as the log names it, or None for a version that does not.
        mark: before lines that are no rows; Markdown may have taken it away.
    """
    lines = [f"{mark} Collective test starting: {test}_perf"] if test else []
    lines += [
        f"{mark} nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: 2(factor) "
        "warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0",
        mark,
        f"{mark} Using devices",
    ]
    lines += [
        f"{mark}  Rank {number:2} Group  0 Pid {1000 + number:6} on {host:>10} device {device:2} "
        f"[0x{number:02x}] {called}"
        for number, (host, device, called) in enumerate(ranks)
    ]
    lines += [
        mark,
        f"{mark}{'':55}out-of-place                       in-place          ",
        f"{mark}       size         count      type   redop    root     time   algbw   busbw"
        " #wrong     time   algbw   busbw #wrong",
        f"{mark}        (B)    (elements)                               (us)  (GB/s)  (GB/s)      "
        "      (us)  (GB/s)  (GB/s)       ",
    ]
    for size in sizes:
        cells = []
        for factor in (1, 2):
            taken = seconds(size) * factor
            algbw = size / taken * 1e-9
            figures = f"{taken * 1e6:9.2f} {algbw:7.2f} {algbw * bus_factor:7.2f}"
            cells.append(f"{figures} {'0' if factor == 1 else 'N/A':>6}")
        lines.append(f"{size:12} {size // 4:13}     float     sum      -1 {' '.join(cells)}")
    lines += [f"{mark} Out of bounds values : 0 OK", f"{mark} Avg bus bandwidth    : 12.34 ", mark]
    return "\n".join(lines) + "\n"


def own_type(folder: Path, name: str) -> Path:
    """Write a cluster file that has a device type without a preset, and nothing else."""
    path = folder / "types.toml"
    path.write_text(
        f'format = "pipeplan-cluster/1"\n[device_types.{name}]\nmemory_gib = 24\n'
        "memory_bandwidth_gb_per_s = 768\npeak_tflop_per_s = { float32 = 27.8 }\n"
    )
    return path
