"""``pipeplan import``: links as clusters, and clusters joined."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption
from planner.cli.output import print_json, show, user_errors
from planner.errors import PipeplanError
from planner.units import plural

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster
    from planner.cluster.merge import MergedBox

CLUSTER_SUFFIXES = (".toml", ".json")
DEFAULT_CLUSTER = Path("cluster.toml")


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="output of `nvidia-smi topo -m` or `rocm-smi --showtopo`, NCCL's topology in XML, "
            "or a log of nccl-tests; with --network cluster files of two boxes or more",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="cluster file to write (.toml or .json, default: cluster.toml)",
        ),
    ] = None,
    format_name: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="kind of FILE (auto: detect it): nvidia-smi, rocm-smi, nccl-topology, nccl-tests, "
            "nccl-all-reduce, nccl-sendrecv",
        ),
    ] = "auto",
    device_type: Annotated[
        str | None,
        typer.Option(
            "--device-type",
            help="the GPUs that the file does not name: a preset, or FILE.toml:NAME for "
            "[device_types.NAME] of a cluster file",
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--given",
            metavar="NAME=VALUE",
            help="what FILE does not say, once for each: pcie=3, peer_to_peer=yes (a name "
            "that the format does not take is refused with those it takes)",
        ),
    ] = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--prefix",
            metavar="NAME",
            help="rename devices and switches of a cluster to NAME/…, the name of their host; once "
            "for each file, in their order",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="LINK",
            help="join the clusters of several boxes by their network cards, through one switch; "
            "the link from each card: a preset (InfiniBand-NDR, Ethernet-25G), or a bandwidth each "
            "way (100gbit, 12.5GB/s)",
        ),
    ] = None,
    latency_us: Annotated[
        float | None,
        typer.Option(
            "--latency-us",
            min=0,
            help="with --network: latency of that link (default: the preset's, else 20)",
        ),
    ] = None,
    card: Annotated[
        list[str] | None,
        typer.Option(
            "--card",
            metavar="NAME",
            help="with --network: what leads to the network, such as mlx5_* (default: every "
            "network card, which is a switch with one link)",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Import links as a cluster file, or join cluster files."""
    with user_errors(as_json):
        path = output or DEFAULT_CLUSTER
        _require_cluster_path(path)
        if network is not None:
            _merge(files, path, network, latency_us, prefix or [], card or [], as_json=as_json)
            return
        _require_one(files, latency_us, card)
        if path.resolve() == files[0].resolve():
            raise PipeplanError(f"-o {path}: is the file to read; choose another name")
        name = prefix[0] if prefix else None
        _import_cluster(
            files[0], path, format_name, device_type, given or [], name, as_json=as_json
        )


def _require_one(files: Sequence[Path], latency_us: float | None, card: list[str] | None) -> None:
    if len(files) > 1:
        raise PipeplanError(
            f"FILE: {plural(len(files), 'file')}; give one, or --network to join cluster files"
        )
    for option, value in (("--latency-us", latency_us), ("--card", card)):
        if value:
            raise PipeplanError(f"{option}: is of a network between boxes; add --network LINK")


def _given(settings: list[str]) -> dict[str, str]:
    """Return given values by name."""
    found: dict[str, str] = {}
    for text in settings:
        name, _, value = text.partition("=")
        if not name or not value or name in found:
            raise PipeplanError(f"--given {text}: expected NAME=VALUE, each name once")
        found[name] = value
    return found


def _require_cluster_path(path: Path) -> None:
    """Refuse a path that no cluster file can have, before any work."""
    from planner.records.document import require_file_path

    if path.suffix not in CLUSTER_SUFFIXES:
        raise PipeplanError(
            f"-o {path}: expected a name that ends in .toml or .json, as this file holds a cluster"
        )
    require_file_path(path)


def _import_cluster(
    file: Path,
    path: Path,
    format_name: str,
    device_type: str | None,
    given: list[str],
    prefix: str | None,
    *,
    as_json: bool,
) -> None:
    """Read measured or listed links and write the cluster file."""
    from planner.cluster.merge import renamed
    from planner.interop.imported import import_cluster
    from planner.interop.machines import ImportOptions

    kind, imported = import_cluster(file, format_name, ImportOptions(device_type, _given(given)))
    if prefix:
        imported = replace(imported, cluster=renamed(imported.cluster, prefix.rstrip("/")))
    cluster = imported.cluster
    cluster.save(path)
    if as_json:
        print_json(
            {
                "format": kind,
                "name": cluster.name,
                "cluster": str(path),
                "devices": list(cluster.device_names),
                "links": [link.model_dump(mode="json") for link in cluster.links],
                "notes": list(imported.notes),
            }
        )
        return
    _show_links(cluster, kind)
    name = shlex.quote(str(path))
    show(
        *(f"note: {note}" for note in imported.notes),
        f"wrote {path}",
        f"next: pipeplan plan MODEL --cluster {name}",
        f"  or: pipeplan import {name} OTHER.toml --network 100gbit",
    )


def _show_links(cluster: Cluster, kind: str) -> None:
    from planner.report.tables import Table

    title = (
        f"{cluster.name} ({kind}): {plural(len(cluster.devices), 'device')}, "
        f"{plural(len(cluster.links), 'link')}"
    )
    table = Table(title, ("between", "and", "source"), ("GB/s", "latency us"))
    for link in cluster.links:
        figures = f"{link.bandwidth_gb_per_s:.4g}", f"{link.latency_us:.4g}"
        table.add_row(*link.between, str(link.source), *figures)
    show(table)


def _merge(
    files: Sequence[Path],
    path: Path,
    network: str,
    latency_us: float | None,
    prefixes: Sequence[str],
    cards: Sequence[str],
    *,
    as_json: bool,
) -> None:
    """Join the clusters of several boxes by their network cards, and write the cluster file."""
    from planner.cluster.merge import card_of_device, merged, network_link
    from planner.plan.operations import compress_devices
    from planner.report.tables import Table

    link = network_link(network, latency_us)
    boxes = _boxes(files, prefixes, cards)
    made = merged(boxes, link, path.stem)
    made.save(path)
    card_of = card_of_device(made, boxes)
    notes = _notes(made, boxes, card_of)
    if as_json:
        devices = list(made.device_names)
        print_json(
            {"cluster": str(path), "devices": devices, "cards": dict(card_of), "notes": notes}
        )
        return
    title = f"{made.name}: {plural(len(made.devices), 'device')}, {plural(len(made.links), 'link')}"
    table = Table(title, ("devices", "reach other boxes by"))
    for card in dict.fromkeys(card_of.values()):
        devices = [device for device, its in card_of.items() if its == card]
        table.add_row(compress_devices(devices), card)
    next_ = f"next: pipeplan plan MODEL --cluster {shlex.quote(str(path))}"
    show(table, *(f"note: {note}" for note in notes), f"wrote {path}", next_)


def _boxes(files: Sequence[Path], prefixes: Sequence[str], cards: Sequence[str]) -> list[MergedBox]:
    """Read the files, and rename what is in them."""
    from planner.cluster.cluster import Cluster
    from planner.cluster.merge import MergedBox, cards_of, renamed

    if len(files) < 2:
        raise PipeplanError(f"FILE: {files[0]} alone cannot be merged; give two files or more")
    if prefixes and len(prefixes) != len(files):
        raise PipeplanError(
            f"--prefix: {plural(len(prefixes), 'prefix', 'es')} for {len(files)} files; give one "
            "for each, in their order, or none"
        )
    boxes = []
    for number, path in enumerate(files):
        one = Cluster.load(path)
        found = cards_of(one, cards, str(path))
        name = prefixes[number].rstrip("/") if prefixes else _default_prefix(one, path)
        if name:
            one, found = renamed(one, name), tuple(f"{name}/{card}" for card in found)
        boxes.append(MergedBox(one, found, str(path)))
    return boxes


def _default_prefix(one: Cluster, path: Path) -> str:
    """Return the file's name, which becomes that of the host; none if devices name their hosts."""
    if all("/" in name for name in one.device_names):
        return ""
    return re.sub(r"[^A-Za-z0-9_.:-]+", "-", path.stem)


def _notes(made: Cluster, boxes: Sequence[MergedBox], cards: Mapping[str, str]) -> list[str]:
    from planner.cluster.merge import detours

    idle = [card for box in boxes for card in box.cards if card not in cards.values()]
    notes = [
        f"{a} and {b} have {outside:.4g} GB/s through the network and {inside:.4g} inside their "
        "box; plans use the wider way, which NCCL does not by default"
        for a, b, inside, outside in detours(made, boxes)
    ]
    if idle:
        notes.append(
            f"no device is nearest to {', '.join(idle)}; a message takes one card, so their "
            "bandwidth stays unused"
        )
    return notes
