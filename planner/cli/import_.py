"""``pipeplan import``: profiles as layer graphs, and measured links as clusters."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import JsonOption
from planner.cli.output import print_json, say, show, user_errors
from planner.errors import PipeplanError
from planner.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from planner.interop.importing.imported import Imported, ImportOptions
    from planner.records.document import Record


SUFFIXES = (".toml", ".json")
DEFAULT_CLUSTER_OUTPUT = Path("cluster.toml")


def require_cluster_path(path: Path) -> None:
    """Refuse a path that no cluster file can have, before any work.

    Raises:
        PipeplanError: with the reason.
    """
    from planner.records.document import require_file_path

    if path.suffix not in SUFFIXES:
        raise PipeplanError(
            f"-o {path}: expected a name that ends in .toml or .json, as this file holds a cluster"
        )
    require_file_path(path)


def import_cluster(
    file: Path,
    output: Path | None,
    kind: str,
    options: ImportOptions,
    prefix: str | None,
    *,
    as_json: bool,
) -> None:
    """Read measured or listed links and write the cluster file.

    Args:
        file: to read.
        output: cluster file; None for ``cluster.toml``.
        kind: of the file, in :data:`planner.interop.importing.formats.CLUSTER_FORMATS`.
        options: what the file does not say.
        prefix: that the names of devices and switches get, with a slash; None for none.
        as_json: print JSON instead of a table.

    Raises:
        PipeplanError: if it cannot be read or written.
    """
    from planner.cluster.merge import renamed
    from planner.interop.importing.formats import import_cluster_file

    path = output or DEFAULT_CLUSTER_OUTPUT
    require_cluster_path(path)
    imported = import_cluster_file(file, kind, options)
    if prefix:
        imported = replace(imported, cluster=renamed(imported.cluster, prefix.rstrip("/")))
    imported.cluster.save(path)
    if as_json:
        print_json(_data(imported, kind, path))
        return
    _show_cluster(imported, kind, path)


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


def _show_cluster(imported: Any, kind: str, path: Path) -> None:
    from planner.report.tables import Table

    cluster = imported.cluster
    title = (
        f"{cluster.name} ({kind}): {plural(len(cluster.devices), 'device')}, "
        f"{plural(len(cluster.links), 'link')}"
    )
    table = Table(title, ("between", "and"), ("GB/s", "latency us", "source"))
    for link in cluster.links:
        table.add_row(
            *link.between,
            f"{link.bandwidth_gb_per_s:.4g}",
            f"{link.latency_us:.4g}",
            link.source,
        )
    show(table)
    for note in imported.notes:
        say(f"note: {note}")
    say(f"wrote {path}")
    name = shlex.quote(str(path))
    say(f"next: pipeplan plan MODEL --cluster {name}")
    say(f"  or: pipeplan cluster merge {name} OTHER.toml --network 100gbit")


SUFFIX = ".json"
DEFAULT_OUTPUT = Path("graph.json")


FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="profile of another tool, output of `nvidia-smi topo -m` or `rocm-smi --showtopo`, "
        "NCCL's topology in XML, or a log of nccl-tests",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="layer graph to write (.json, default: graph.json), with the job next to it as "
        "NAME.job.json; for links, the cluster file to write (.toml or .json, default: "
        "cluster.toml)",
    ),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FORMAT",
        help="kind of FILE (auto: detect it): dapple, pipedream, nvidia-smi, rocm-smi, "
        "nccl-topology, nccl-tests, nccl-all-reduce, nccl-sendrecv",
    ),
]
DeviceTypeOption = Annotated[
    str | None,
    typer.Option(
        "--device-type",
        help="the device that was profiled (default: V100-16GB), or the GPUs that the file does "
        "not name: a preset, or FILE.toml:NAME for [device_types.NAME] of a cluster file",
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option("--samples-per-microbatch", help="samples in the profiled batch"),
]
FreeInputsOption = Annotated[
    bool, typer.Option("--free-inputs", help="count input nodes of a profile as 0 s")
]
GivenOption = Annotated[
    list[str] | None,
    typer.Option(
        "--given",
        metavar="NAME=VALUE",
        help="what FILE does not say, once for each: pcie=3, peer_to_peer=yes (a name "
        "that the format does not take is refused with those it takes)",
    ),
]


PrefixOption = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        metavar="NAME",
        help="rename devices and switches of a cluster to NAME/…, the name of their host",
    ),
]


def import_(
    file: FileArgument,
    output: OutputOption = None,
    format_name: FormatOption = "auto",
    device_type: DeviceTypeOption = None,
    samples: SamplesOption = None,
    free_inputs: FreeInputsOption = False,
    given: GivenOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import a profile as a layer graph, or measured links as a cluster file."""
    with user_errors(as_json):
        from planner.interop.importing.formats import CLUSTER_FORMATS, format_of
        from planner.interop.importing.imported import ImportOptions

        if output is not None:
            _require_apart(file, output)
        kind = format_of(file, format_name)
        if kind in CLUSTER_FORMATS:
            _refuse_profile_options(samples, free_inputs)
        options = ImportOptions(device_type, samples, free_inputs, _given(given or []))
        if kind in CLUSTER_FORMATS:
            import_cluster(file, output, kind, options, prefix, as_json=as_json)
        else:
            if prefix is not None:
                raise PipeplanError("--prefix applies to clusters only; remove it")
            _import_profile(file, output or DEFAULT_OUTPUT, kind, options, as_json=as_json)


def _given(settings: list[str]) -> dict[str, str]:
    """Return given values by name."""
    found: dict[str, str] = {}
    for text in settings:
        name, _, value = text.partition("=")
        if not name or not value or name in found:
            raise PipeplanError(f"--given {text}: expected NAME=VALUE, each name once")
        found[name] = value
    return found


def _refuse_profile_options(samples: int | None, free_inputs: bool) -> None:
    if samples is not None or free_inputs:
        raise PipeplanError(
            "--samples-per-microbatch and --free-inputs apply to profiles only; remove them"
        )


def _import_profile(
    file: Path, output: Path, kind: str, options: ImportOptions, *, as_json: bool
) -> None:
    from planner.interop.importing.formats import import_file

    paths = _paths(output)
    name, imported = import_file(file, kind, options)
    _write(imported, paths)
    if as_json:
        print_json(_report(name, imported, paths))
    else:
        _show(name, imported, paths)


def _require_apart(file: Path, output: Path) -> None:
    """Refuse to write over the file to read."""
    for path in (output, output.with_suffix(f".job{SUFFIX}")):
        if path.resolve() == file.resolve():
            raise PipeplanError(f"-o {output}: {path} is the file to read; choose another name")


def _paths(output: Path) -> dict[str, Path]:
    """Return where the artifacts go, by kind; refuse before any work if they cannot be written."""
    from planner.records.document import require_file_path

    if output.suffix != SUFFIX:
        raise PipeplanError(
            f"-o {output}: expected a name that ends in {SUFFIX}, because `pipeplan plan` "
            f"recognises layer graphs by it; for example {output.with_suffix(SUFFIX)}"
        )
    paths = {"graph": output, "job": output.with_suffix(f".job{SUFFIX}")}
    for path in paths.values():
        require_file_path(path)
    return paths


def _write(imported: Imported, paths: dict[str, Path]) -> None:
    from planner.records.document import write_atomically

    records: dict[str, Record] = {"graph": imported.graph.record, "job": imported.job}
    for kind, record in records.items():
        write_atomically(paths[kind], record.model_dump_json(indent=1) + "\n")


def _report(name: str, imported: Imported, written: dict[str, Path]) -> dict[str, Any]:
    graph = imported.graph
    measured = [
        min(layer.measured.values(), key=lambda times: times.forward_s + times.whole_backward_s)
        for layer in graph.record.layers
        if layer.measured
    ]
    return {
        "format": name,
        "name": graph.name,
        **{kind: str(path) for kind, path in written.items()},
        "layers": len(graph.record.layers),
        "boundaries": len(graph.record.boundaries),
        "samples_per_microbatch": graph.record.samples_per_microbatch,
        "forward_s": sum(times.forward_s for times in measured),
        "backward_s": sum(times.whole_backward_s for times in measured),
        "parameter_bytes": sum(parameter.bytes for parameter in graph.record.parameters),
        "stash_bytes": sum(layer.stash_bytes for layer in graph.record.layers),
        "notes": list(imported.notes),
    }


def _show(name: str, imported: Imported, written: dict[str, Path]) -> None:
    report = _report(name, imported, written)
    say(
        f"{report['name']} ({name}): {plural(report['layers'], 'layer')}, "
        f"{plural(report['boundaries'], 'boundary tensor')}, "
        f"{plural(report['samples_per_microbatch'], 'sample')} per microbatch"
    )
    say(
        f"one microbatch: forward {format_seconds(report['forward_s'])}, backward "
        f"{format_seconds(report['backward_s'])}, stash {format_bytes(report['stash_bytes'])}; "
        f"parameters {format_bytes(report['parameter_bytes'])}"
    )
    for note in imported.notes:
        say(f"note: {note}")
    job_path = written["job"]
    replication = "stages may have replicas" if imported.job.replication else "no replicas"
    say(
        f"assumed for the job: {plural(imported.job.microbatches, 'microbatch', 'es')}, "
        f"{replication}; edit {job_path} to change it"
    )
    say(f"wrote {', '.join(map(str, written.values()))}")
    graph, job = (shlex.quote(str(written[kind])) for kind in ("graph", "job"))
    say(f"next: pipeplan plan {graph} --cluster CLUSTER.toml --job {job}")
