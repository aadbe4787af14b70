"""``pipeplan import`` of files that tell of links."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from planner.cli.output import print_json, print_rich
from planner.errors import PipeplanError
from planner.units import plural

SUFFIXES = (".toml", ".json")
DEFAULT_OUTPUT = Path("cluster.toml")


def import_cluster(
    file: Path, output: Path | None, kind: str, device_type: str | None, *, as_json: bool
) -> None:
    """Read a file and write the cluster it tells of.

    Args:
        file: to read.
        output: cluster file; None for ``cluster.toml``.
        kind: of the file, in :data:`planner.importing.formats.CLUSTER_FORMATS`.
        device_type: preset of the GPUs; None if the file names them.
        as_json: print JSON instead of a table.

    Raises:
        PipeplanError: if it cannot be read or written.
    """
    from planner.artifacts.document import require_file_path
    from planner.importing.formats import import_cluster_file

    path = output or DEFAULT_OUTPUT
    if path.suffix not in SUFFIXES:
        raise PipeplanError(
            f"-o {path}: expected a name that ends in .toml or .json, as this file holds a cluster"
        )
    require_file_path(path)
    imported = import_cluster_file(file, kind, device_type)
    imported.cluster.save(path)
    if as_json:
        print_json(_data(imported, kind, path))
        return
    _show(imported, kind, path)


def _data(imported: Any, kind: str, path: Path) -> dict[str, Any]:
    cluster = imported.cluster
    return {
        "format": kind,
        "name": cluster.name,
        "cluster": str(path),
        "devices": list(cluster.device_names),
        "links": [link.model_dump(mode="json") for link in cluster.links],
        "notes": list(imported.notes),
    }


def _show(imported: Any, kind: str, path: Path) -> None:
    from planner.report.tables import new_table, plain

    cluster = imported.cluster
    title = (
        f"{cluster.name} ({kind}): {plural(len(cluster.devices), 'device')}, "
        f"{plural(len(cluster.links), 'link')}"
    )
    table = new_table(title, ("between", "and"), ("GB/s", "latency us", "source"))
    for link in cluster.links:
        table.add_row(
            *map(plain, link.between),
            f"{link.bandwidth_gb_per_s:.4g}",
            f"{link.latency_us:.4g}",
            link.source,
        )
    print_rich(table)
    for note in imported.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {path}")
    typer.echo(f"next: pipeplan plan MODEL --job JOB.toml --cluster {shlex.quote(str(path))}")
