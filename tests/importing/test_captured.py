"""Output as launchers, terminals and other systems write it is read as the tool printed it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from link_files import nccl_log, rocm_topology, topology

from planner.cluster.cluster import Cluster
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportOptions

A100 = "NVIDIA A100-SXM4-80GB"
TABLE = topology(
    [
        "X NV12 PXB SYS SYS",
        "NV12 X SYS PXB PXB",
        "PXB SYS X SYS SYS",
        "SYS PXB SYS X PIX",
        "SYS PXB SYS PIX X",
    ],
    numa=["0", "1"],
    cards=("NIC0", "NIC1", "mlx5_2"),
    more="\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n\n"
    f"GPU 0: {A100} (UUID: GPU-0)\nGPU 1: {A100} (UUID: GPU-1)\n",
)
LOG = nccl_log(
    [("n0", 0, A100), ("n0", 1, A100), ("n1", 0, A100)],
    lambda size: 1e-5 + size / 50e9,
    [8 * 4**n for n in range(14)],
    1.0,
    "sendrecv",
)
ROCM = rocm_topology(["0 XGMI", "XGMI 0"], ["0 15", "15 0"], ["0", "1"]) + (
    "GPU[0]\t\t: Card Series: AMD Instinct MI210\nGPU[1]\t\t: Card Series: AMD Instinct MI210\n"
)
FILES = {"table": TABLE, "log": LOG, "rocm-smi": ROCM}


def before(prefix: str) -> Callable[[str], bytes]:
    return lambda text: "".join(prefix + line for line in text.splitlines(True)).encode()


FORMS: dict[str, Callable[[str], bytes]] = {
    "mpirun --tag-output": before("[1,0]<stdout>:"),
    "mpirun --tag-output, version 5": before("[prterun-n0-1@1,0]<stdout>: "),
    "mpirun --timestamp-output": before("Mon Jan  5 10:00:00 2026<stdout>:"),
    "mpiexec -prepend-rank": before("[0] "),
    "srun --label": before(" 0: "),
    "srun --label of 16 tasks": before("15: "),
    "torchrun": before("[rank0]:"),
    "torchrun --tee": before("[default0]:"),
    "docker compose": before("worker-1  | "),
    "kubectl logs --timestamps": before("2026-01-05T10:00:00.123456789Z "),
    "kubectl logs --prefix": before("[pod/nccl-0/main] "),
    "journald": before("Jan 05 10:00:00 n0 run[123]: "),
    "pdsh": before("n0: "),
    "parallel --tag": before("n0\t"),
    "Ray": before("(worker pid=12, ip=10.0.0.1) "),
    "lines in JSON": lambda text: "".join(
        json.dumps({"log": f"{line}\n", "stream": "stdout"}) + "\n"
        for line in text.expandtabs().splitlines()
    ).encode(),
    "logging": before("2026-01-05 10:00:00,123 INFO: "),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "PowerShell": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
    "spaces of a web page": lambda text: text.replace("\t", "    ").replace(" ", "\xa0").encode(),
    "colours": lambda text: "".join(
        f"\x1b[0;32m{line}\x1b[0m\x1b[K\n" for line in text.splitlines()
    ).encode(),
}


def read(path: Path, data: bytes) -> tuple[Cluster, tuple[str, ...]]:
    path.write_bytes(data)
    found = import_cluster(path, options=ImportOptions())[1]
    return found.cluster, found.notes


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_read_as_the_tool_printed_it(file: str, form: str, tmp_path: Path) -> None:
    expected = read(tmp_path / "file.txt", FILES[file].encode())
    assert read(tmp_path / "file.txt", FORMS[form](FILES[file])) == expected


def wrapped(text: str, width: int) -> str:
    """As a terminal of that width breaks lines between words."""
    lines = []
    for line in text.expandtabs(8).splitlines():
        while len(line) > width:
            place = line.rindex(" ", 0, width)
            lines.append(line[:place])
            line = line[place:]
        lines.append(line)
    return "\n".join(lines)


P2P = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n\nLegend:\n\n  X    = Self\n"
GLUED = {
    "columns": lambda text: text.replace("\tNIC0\tNIC1\t", "\tNIC0NIC1\t"),
    "GPUs": lambda text: text.replace("GPU0\tGPU1", "GPU0GPU1", 1),
    "cells": lambda text: text.replace("SYS\tPXB", "SYSPXB").replace("SYS\tSYS", "SYSSYS"),
    "NVLinks": lambda text: text.replace("X\tNV12\tPXB", "XNV12PXB"),
    "lines of a table in Markdown": lambda text: text.replace("\t", " | "),
    "lines broken in a terminal": lambda text: wrapped(text, 48),
}


@pytest.mark.parametrize("form", GLUED)
def test_words_that_lost_their_places_are_read(form: str, tmp_path: Path) -> None:
    changed = GLUED[form](TABLE)
    assert changed != TABLE
    expected = read(tmp_path / "file.txt", TABLE.encode())
    assert read(tmp_path / "file.txt", changed.encode()) == expected


def test_a_table_of_peer_access_beside_the_other_is_left_out(tmp_path: Path) -> None:
    expected = read(tmp_path / "file.txt", TABLE.encode())
    assert read(tmp_path / "file.txt", (TABLE + "\n" + P2P).encode()) == expected
