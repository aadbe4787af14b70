"""``pipeplan import``: links as clusters, and clusters joined."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import JsonOption
from planner.cli.output import print_json, require_outputs, show, user_errors
from planner.errors import PipeplanError
from planner.units import plural

if TYPE_CHECKING:
    from planner.cluster.cluster import Cluster
    from planner.cluster.merge import MergedBox

FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="output of `nvidia-smi topo -m` or `rocm-smi --showtopo`, NCCL's topology in XML, "
        "or a log of nccl-tests; with --network cluster files of two boxes or more",
    ),
]
OutputOption = Annotated[
    Path, typer.Option("-o", "--output", help="cluster file to write (.toml or .json)")
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FORMAT",
        help="kind of FILE (auto: detect it): nvidia-smi, rocm-smi, nccl-topology, nccl-tests, "
        "nccl-all-reduce, nccl-sendrecv",
    ),
]
TypeOption = Annotated[
    str | None,
    typer.Option(
        "--device-type",
        help="the GPUs that the file does not name: a preset, or FILE.toml:NAME for "
        "[device_types.NAME] of a cluster file",
    ),
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
    list[str] | None,
    typer.Option(
        "--prefix",
        metavar="NAME",
        help="rename devices and switches of a cluster to NAME/…, the name of their host; once "
        "for each file, in their order",
    ),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="LINK",
        help="join the clusters of several boxes by their network cards, through one switch; "
        "the link from each card: a preset (InfiniBand-NDR, Ethernet-25G), or a bandwidth each "
        "way (100gbit, 12.5GB/s)",
    ),
]
LatencyOption = Annotated[
    float | None,
    typer.Option(
        "--latency-us",
        min=0,
        help="with --network: latency of that link (default: the preset's, else 20)",
    ),
]
CardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--card",
        metavar="NAME",
        help="with --network: what leads to the network, such as mlx5_* (default: every "
        "network card, which is a switch with one link)",
    ),
]


def import_(
    files: FilesArgument,
    output: OutputOption = Path("cluster.toml"),
    format_name: FormatOption = "auto",
    device_type: TypeOption = None,
    given: GivenOption = None,
    prefix: PrefixOption = None,
    network: NetworkOption = None,
    latency_us: LatencyOption = None,
    card: CardOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import links as a cluster file, or join cluster files."""
    with user_errors(as_json):
        require_outputs({"--output": output}, files, {"--output": (".toml", ".json")})
        if network is not None:
            boxes = _boxes(files, prefix or [], card or [])
            _join(boxes, output, network, latency_us, as_json=as_json)
            return
        if len(files) > 1:
            raise PipeplanError(
                f"FILE: {plural(len(files), 'file')}; give one, or --network to join cluster files"
            )
        for option, value in (("--latency-us", latency_us), ("--card", card)):
            if value:
                raise PipeplanError(f"{option}: is of a network between boxes; add --network LINK")
        name = prefix[0].rstrip("/") if prefix else ""
        _import(files[0], output, format_name, device_type, given or [], name, as_json=as_json)


def _import(
    file: Path,
    output: Path,
    format_name: str,
    device_type: str | None,
    given: Sequence[str],
    prefix: str,
    *,
    as_json: bool,
) -> None:
    """Read measured or listed links and write the cluster file."""
    from planner.cluster.merge import renamed
    from planner.interop.imported import import_cluster
    from planner.interop.machines import ImportOptions
    from planner.report.tables import Table

    kind, imported = import_cluster(file, format_name, ImportOptions(device_type, _given(given)))
    if prefix:
        imported = replace(imported, cluster=renamed(imported.cluster, prefix))
    cluster = imported.cluster
    cluster.save(output)
    if as_json:
        print_json(
            {
                "format": kind,
                "name": cluster.name,
                "cluster": str(output),
                "devices": list(cluster.device_names),
                "links": [link.model_dump(mode="json") for link in cluster.links],
                "notes": list(imported.notes),
            }
        )
        return
    rows = (
        (*x.between, str(x.source), f"{x.bandwidth_gb_per_s:.4g}", f"{x.latency_us:.4g}")
        for x in cluster.links
    )
    words, figures = ("between", "and", "source"), ("GB/s", "latency us")
    show(Table.of(f"{cluster.name} ({kind}): {_size(cluster)}", words, figures, rows))
    show(*_written(output, imported.notes))
    show(f"  or: pipeplan import {shlex.quote(str(output))} OTHER.toml --network 100gbit")


def _given(settings: Sequence[str]) -> dict[str, str]:
    """Return given values by name."""
    found: dict[str, str] = {}
    for text in settings:
        name, _, value = text.partition("=")
        if not name or not value or name in found:
            raise PipeplanError(f"--given {text}: expected NAME=VALUE, each name once")
        found[name] = value
    return found


def _size(cluster: Cluster) -> str:
    return f"{plural(len(cluster.devices), 'device')}, {plural(len(cluster.links), 'link')}"


def _written(output: Path, notes: Iterable[str]) -> Iterator[str]:
    yield from (f"note: {note}" for note in notes)
    yield f"wrote {output}"
    yield f"next: pipeplan plan MODEL --cluster {shlex.quote(str(output))}"


# --- clusters joined ------------------------------------------------------------------------------


def _join(
    boxes: Sequence[MergedBox],
    output: Path,
    network: str,
    latency_us: float | None,
    *,
    as_json: bool,
) -> None:
    """Join the clusters of several boxes by their network cards, and write the cluster file."""
    from planner.cluster.merge import card_of_device, merged, network_link
    from planner.plan.operations import compress_devices
    from planner.report.tables import Table

    made = merged(boxes, network_link(network, latency_us), output.stem)
    made.save(output)
    card_of = card_of_device(made, boxes)
    notes = list(_notes(made, boxes, card_of))
    if as_json:
        devices = list(made.device_names)
        cards = dict(card_of)
        print_json({"cluster": str(output), "devices": devices, "cards": cards, "notes": notes})
        return
    rows = (
        (compress_devices([device for device, its in card_of.items() if its == card]), card)
        for card in dict.fromkeys(card_of.values())
    )
    table = Table.of(f"{made.name}: {_size(made)}", ("devices", "reach other boxes by"), (), rows)
    show(table, *_written(output, notes))


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


def _notes(made: Cluster, boxes: Sequence[MergedBox], cards: Mapping[str, str]) -> Iterator[str]:
    from planner.cluster.merge import detours

    for a, b, inside, outside in detours(made, boxes):
        yield (
            f"{a} and {b} have {outside:.4g} GB/s through the network and {inside:.4g} inside "
            "their box; plans use the wider way, which NCCL does not by default"
        )
    idle = [card for box in boxes for card in box.cards if card not in cards.values()]
    if idle:
        yield (
            f"no device is nearest to {', '.join(idle)}; a message takes one card, so their "
            "bandwidth stays unused"
        )
