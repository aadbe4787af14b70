"""Real files of Sailor, Metis and Galvatron, and whether they can be imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PipeplanError
from planner.interop.importing.formats import (
    CLUSTER_FORMATS,
    format_of,
    import_cluster_file,
    import_file,
)
from planner.interop.importing.imported import ImportOptions
from planner.records.document import read_json

PRESET = "A100-80GB"
"""Its figures are of no consequence here: times are measured."""
BOUNDARY_BYTES = "16777216"
COLUMNS = ("format", "what", "imported", "refused")


@dataclass(frozen=True)
class Kind:
    """Files of one kind below a folder of checkouts.

    Attributes:
        format_name: of :mod:`planner.interop.importing.formats`.
        pattern: of their paths.
        what: for the report.
    """

    format_name: str
    pattern: str
    what: str


KINDS = (
    Kind(
        "sailor",
        "sailor/sailor/Planner/sailor_planner/profiles/*/*/profile.json",
        "profiles, each microbatch size and tensor degree",
    ),
    Kind("sailor-links", "sailor/sailor/providers/network_coeffs_all_homo.json", "each GPU"),
    Kind("metis", "Metis/profile_data_samples/DeviceType.*.json", "profiles"),
    Kind(
        "galvatron",
        "Hetu-Galvatron/galvatron/models/*/configs/computation_profiling_*.json",
        "profiles, each batch size",
    ),
    Kind(
        "galvatron-links",
        "Hetu-Galvatron/galvatron/profile_hardware/hardware_configs/p2p_bandwidth_*.json",
        "clusters",
    ),
)


def rows(data: Path) -> Iterator[tuple[str, ...]]:
    """Yield, for each kind of which there are files, how many can be imported, and why not."""
    for kind in KINDS:
        imported, refused = 0, dict[str, None]()
        for path in sorted(data.glob(kind.pattern)):
            for options in _choices(kind.format_name, path):
                try:
                    _require_import(kind.format_name, path, options)
                    imported += 1
                except PipeplanError as error:
                    refused |= dict.fromkeys(
                        problem.replace(str(data), "DATA") for problem in error.problems
                    )
        if imported or refused:
            yield kind.format_name, kind.what, str(imported), "; ".join(refused) or "-"


def _require_import(format_name: str, path: Path, options: ImportOptions) -> None:
    """Import a file as the format that it is recognised as."""
    if format_of(path) != format_name:
        raise PipeplanError(f"{path}: recognised as {format_of(path)}")
    if format_name in CLUSTER_FORMATS:
        import_cluster_file(path, format_name, options)
    else:
        import_file(path, format_name, options)


def _choices(format_name: str, path: Path) -> Iterator[ImportOptions]:
    """Yield the options for all that a file has."""
    if format_name == "sailor":
        for samples, degrees in read_json(path).items():
            for degree in degrees:
                yield ImportOptions(PRESET, int(samples), given={"tensor_parallel": degree})
    elif format_name == "sailor-links":
        for gpu, counts in read_json(path)["inter"].items():
            for count in counts:
                given = {"hosts": f"{gpu}*2", "gpus_per_host": count, "tensor_parallel": count}
                yield ImportOptions(PRESET, given=given)
    elif format_name == "metis":
        degree = path.stem.rpartition("_tp")[2].partition("_")[0]
        given = {"boundary_bytes": BOUNDARY_BYTES, "tensor_parallel": degree}
        yield ImportOptions(PRESET, given=given)
    elif format_name == "galvatron":
        given = {"boundary_bytes": BOUNDARY_BYTES, "layers": "32"}
        batches = {key.split("_bsz")[1].split("_")[0] for key in read_json(path) if "_bsz" in key}
        for batch in sorted(batches, key=int):
            yield ImportOptions(PRESET, int(batch), given=given)
    else:
        yield ImportOptions(PRESET)
