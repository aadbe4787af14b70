"""Files of machines that cannot be right are refused with their cause, whatever their format."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from link_files import nccl_log, rocm_topology, topology
from test_captured import A100, LOG, P2P, TABLE
from test_nccl_logs import SIZES, log_of, ranks
from test_nccl_topology import C2C, TO_SWITCH, gpu, system, tray
from test_rocm_topology import ALL_JOINED
from test_topology import HGX, full

from planner.errors import PipeplanError
from planner.interop.imported import import_cluster
from planner.interop.machines import ImportOptions

GATHERED = nccl_log(ranks(8), lambda n: 1e-5 + n / 50e9, SIZES, 7 / 8, test=None)
KIND = "Link Type between two GPUs"
ONE_TRAY = system(tray("0x1", gpu(0, "")))
REFUSED: dict[str, list[tuple[str, str | None, str]]] = {
    "nvidia-smi": [
        (P2P, None, "is of `nvidia-smi topo -p2p`, which tells whether .* `nvidia-smi topo -m`"),
        ("$ nvidia-smi topo -mp\n" + TABLE, None, "hides NVLinks; give .* `nvidia-smi topo -m`"),
        (TABLE + TABLE, None, "has 2 tables, which begin on lines 1 and 20|lines 1, 2"),
        (
            TABLE.replace("GPU1\tNV12", "GPU0\t X \tNV12\tPXB\tSYS\tSYS\nGPU1\tNV12"),
            None,
            "a second row of GPU0; a file is of one machine",
        ),
        (TABLE.replace("\tNIC0\tNIC1", "\tNIC1", 1), None, "row NIC1: expected X in its"),
        (
            TABLE.replace("PXB\tSYS\tX\tSYS", "PXB\tX\tSYS"),
            None,
            "row NIC0 has 4 cells for 5 columns",
        ),
        (TABLE.partition("NIC1\tSYS")[0], None, "no row of NIC1, mlx5_2; it may be cut off"),
        (TABLE + "  MIG 3g.40gb  Device  0: (UUID: MIG-1)\n", None, "divided .*MIG 3g.40gb"),
        (TABLE.replace("NV12", "ERR!"), None, "GPU0 and GPU1: 'ERR!' is none of NV#"),
        (TABLE.replace("NV12", "NV18"), None, "has at most 12 NVLinks; give the --device"),
        (TABLE.replace(A100, "NVIDIA L4"), None, "by NV12, and L4 has no NVLinks"),
        ("nothing of the kind\n", None, "has no table of `nvidia-smi topo -m`"),
        (HGX.partition("NIC1\tNODE")[0], None, "no row of NIC1, mlx5_8, mlx5_bond_0; it may be"),
        (
            topology(["X NV4", "NV4"]).replace("\t0-15,32-47\t0\t\tN/A", ""),
            None,
            "row GPU1 has 1 cells for 2 columns",
        ),
        (topology(["X"]), None, "has one GPU"),
        (topology(full(2, "NV4")), None, "does not say what GPU0 is; give --device-type"),
        (topology(full(2, "NV4")), "A1000", "device_type: 'A1000' is unknown; use one of"),
    ],
    "nccl-tests": [
        (LOG + LOG, None, "rank 0 appears 2 times: several logs in one file"),
        (LOG.replace(A100, "NVIDIA H20"), None, "'NVIDIA H20' is no preset; give --device"),
        ("no log\n", None, "has no table of nccl-tests"),
        (log_of().replace("Rank  1", "Rank  5"), None, "names 2 ranks"),
        (
            log_of().replace("on         n0 device  1", "on         n0 device  0"),
            None,
            "two ranks share",
        ),
        (log_of(test="alltoall"), None, "is of alltoall_perf; those that can be read are all_red"),
        (GATHERED, None, "0.875 of the algorithm's, in all_reduce_perf of 8 ranks 1.75"),
        (log_of("Tesla P4"), None, "rank 0: 'Tesla P4' is no preset; give --device-type"),
        (log_of("Tesla V100"), None, "is no preset; give --device-type"),
        (log_of(), "P4", "device_type: 'P4' is unknown"),
        (log_of().partition(f"\n{SIZES[0]:12}")[0], None, "the table has no row"),
        (re.sub("#.*(Out of bounds|Avg bus).*", "", log_of()), None, "cut off"),
        (log_of().replace(" 0     ", " 3     "), None, r"found wrong values \(#wrong is 3\)"),
    ],
    "rocm-smi": [
        (ALL_JOINED.replace("Link Type between", "Link between"), "MI300X", f"no table '{KIND}'"),
        (
            ALL_JOINED.replace("GPU3   XGMI XGMI XGMI 0", "GPU3   XGMI XGMI"),
            "MI300X",
            f"line 22: '{KIND}': e",
        ),
        (
            ALL_JOINED.replace("GPU1   XGMI 0 XGMI XGMI", "GPU1   XGMI 0 CXL XGMI"),
            "MI300X",
            "line 20: GPU1 and GPU2: expected ",
        ),
        (
            ALL_JOINED.replace("GPU0 GPU1 GPU2 GPU3", ""),
            "MI300X",
            f"line 18: expected the GPUs of '{KIND}'",
        ),
        (ALL_JOINED, None, "does not say what GPU0 is; give --device-type"),
        (rocm_topology(["0"], ["0"], ["0"]), "MI300X", f"has no table '{KIND}' of two GPUs"),
    ],
    "nccl-topology": [
        ('<graphs version="1"><graph id="0"/></graphs>', None, "NCCL_GRAPH_DUMP_FILE has rings"),
        (ONE_TRAY.replace("</system>", ""), None, "may be cut off"),
        (f'<!DOCTYPE x [<!ENTITY a "b">]>{system()}', None, "document type or entities"),
        (ONE_TRAY, None, "PCI device '0x31c2' is no preset; give --device"),
        (system(tray("0x1", gpu(0, "") + gpu(0, ""))), "GB300", "two GPUs are gpu0"),
        (system(tray("0x1", gpu(0, TO_SWITCH.replace("18", "-1")))), "GB300", "count='-1'"),
        (system(tray("0x1", gpu(0, C2C.replace("44712", "1e9")))), "GB300", "c2c bw='1e9'"),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "kind", "words"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_a_file_that_cannot_be_right_is_refused(
    name: str, text: str, kind: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.txt"
    path.write_text(text)
    with pytest.raises(PipeplanError, match=words):
        import_cluster(path, name, ImportOptions(kind))
