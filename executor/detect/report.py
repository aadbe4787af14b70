"""The report of a measurement: the cluster file, tables for people, JSON for programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from executor.detect.options import TOLERANCE, MeasurementOptions
from executor.launch.console import say
from planner.cluster.cluster import Cluster
from planner.cluster.cluster_file import cluster_toml
from planner.errors import PipeplanError
from planner.records.document import write_atomically
from planner.topology.candidates import cluster_without_links
from planner.topology.choice import TopologyChoice, choose_topology, reduction_errors
from planner.topology.measurements import UNEQUAL, BothWays, Ends, Measurements
from planner.units import format_seconds, plural

MOST_ROWS = 64
"""Rows of a table that are shown; --json has all."""
MOST_SPREAD = 10.0
"""The largest spread over the median that is shown as a figure."""
ASYMMETRIC = 0.1
"""Directions of a pair that differ by a larger share are noted."""
LITTLE_MORE = 1.1
"""Ranks of a host that together do less than so many times one rank's work are noted."""
UNEASY = 0.5
"""A spread over the median that is noted."""
_AGAIN = "measure again when nothing else uses the machines"


def conclude(
    options: MeasurementOptions,
    backend: str,
    found: Measurements,
    notes: Sequence[str],
    *,
    is_partial: bool = False,
) -> None:
    """Choose a topology, write the cluster file, and print the figures.

    Args:
        options: of the command.
        backend: what carried the messages.
        found: what was measured.
        notes: to be printed.
        is_partial: whether something is missing.

    Raises:
        PipeplanError: if the file cannot be written, or nothing can be concluded of any pair.
    """
    data = {"is_partial": is_partial, **_device_data(options, backend, found)}
    lines, after = _device_lines(found), list[str]()
    if len(found.members) == 1:
        cluster = cluster_without_links(found, options.name)
        head = ["Measured by pipeplan detect: one device, without links."]
    elif not found.pairs:
        raise PipeplanError(notes)
    else:
        choice = choose_topology(found, TOLERANCE, options.name)
        cluster, head = choice.taken.topology.cluster, _head(found, choice, backend, is_partial)
        notes = [*notes, *_notes(options, found, cluster)]
        data |= {**_link_data(found, choice), "notes": notes}
        tables = [lines, *_link_tables(found, choice)]
        lines = [line for table in tables if table for line in (*table, "")]
        lines += [f"note: {note}" for note in notes]
        after = [f"next: pipeplan plan MODEL --cluster {shlex.quote(str(options.output))}"]
    _write(options, cluster, head)
    if options.as_json:
        print(json.dumps(data, indent=1), flush=True)
    else:
        for line in (*lines, f"wrote {options.output}", *after):
            say(line)


def _write(options: MeasurementOptions, cluster: Cluster, head: Sequence[str]) -> None:
    if options.output.suffix == ".json":
        cluster.save(options.output)
        return
    comments = "".join(f"# {line}\n" for line in head)
    write_atomically(options.output, comments + cluster_toml(cluster))


def _head(found: Measurements, choice: TopologyChoice, backend: str, is_partial: bool) -> list[str]:
    ranks = plural(len(found.members), "rank")
    hosts = plural(len(found.devices_of_hosts), "host")
    missing = f"Interrupted: {plural(len(found.missing), 'pair')} of devices not measured."
    return [
        f"Measured by pipeplan detect over {backend}: {ranks} on {hosts}.",
        f"Wiring: {choice.taken.topology.title}.",
        *_beside_lines(found),
        *[missing] * is_partial,
    ]


# --- notes ----------------------------------------------------------------------------------------


def _notes(options: MeasurementOptions, found: Measurements, cluster: Cluster) -> Iterator[str]:
    if missing := found.missing:
        alike = all(cluster.route(*ends) is not None for ends in missing)
        taken = "are taken to be as the others" if alike else "may have no link"
        yield f"pairs that were not measured {taken}: {_shown(missing)}"
    for told, figure, limit in _UNEVEN:
        rows = [
            (figure(row), ends) for ends, row in found.pairs.items() if figure(row) > limit(row)
        ]
        if rows:
            share, (a, b) = max(rows)
            yield f"{told} ({plural(len(rows), 'pair')}, most {a} - {b}: {shown_spread(share)})"
    if not options.together:
        yield "flows at the same time were not measured: what pairs share is only assumed"


_Figure = Callable[[BothWays], float]
_UNEVEN: tuple[tuple[str, _Figure, _Figure], ...] = (
    (
        f"messages took uneven times: {_AGAIN}, or with --busy",
        lambda pair: pair.spread,
        lambda _: UNEASY,
    ),
    (
        "one way is faster than the other, and a link of the cluster file has one bandwidth, that "
        "of the mean time a byte",
        lambda pair: pair.asymmetry,
        lambda pair: ASYMMETRIC + 2 * pair.spread,
    ),
    (
        "one way has a longer latency than the other, and the cluster file has the lower one, as "
        f"nothing makes a message faster than its link: {_AGAIN}",
        lambda pair: pair.latency_ratio - 1,
        lambda _: UNEQUAL - 1,
    ),
)
"""Notes about pairs, with the share that each is about and the share up to which it is left out."""


def _shown(pairs: Sequence[Ends]) -> str:
    rest = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
    return ", ".join(f"{a} - {b}" for a, b in pairs[:8]) + rest


# --- tables ---------------------------------------------------------------------------------------


def _device_lines(found: Measurements) -> list[str]:
    """Return what was measured of device types, and how ranks of a host slow each other."""
    rows = [
        (
            name,
            f"{kind.memory_gib:.4g}",
            f"{kind.memory_bandwidth_gb_per_s:.4g}",
            f"{kind.operation_overhead_us:.3g}",
            ", ".join(f"{key} {value:.3g}" for key, value in kind.peak_tflop_per_s.items()),
        )
        for name, kind in found.types.items()
        if kind.source == "measured"
    ]
    lines = _table(("device type", "GiB", "GB/s", "overhead µs", "TFLOP/s"), rows)
    for host, slowdown in found.slowdowns.items():
        factors = ", ".join(f"{factor:.3g}" for factor in slowdown)
        lines.append(
            f"{host}: while 1 to {len(slowdown)} ranks compute, they take {factors} times as long"
        )
        if host in found.hosts and found.hosts[host].capacity < LITTLE_MORE:
            lines.append(
                f"note: more ranks of {host} do no more work than one, and plans will use one; if "
                f"something else used it, {_AGAIN}"
            )
    return lines + _beside_lines(found)


def _beside_lines(found: Measurements) -> list[str]:
    return [f"{name}: {row}" for name, row in found.beside.items()]


def _link_tables(found: Measurements, choice: TopologyChoice) -> Iterator[list[str]]:
    """Yield tables of pairs, wirings, concurrent messages and all-reduces."""
    ways = [
        (
            *(way.source, way.target, format_seconds(way.latency_s)),
            *(shown_spread(way.latency_spread), f"{way.bandwidth_gb_per_s:.4g}"),
            shown_spread(way.bandwidth_spread),
        )
        for way in sorted(found.ways.values(), key=lambda way: way.bandwidth_gb_per_s)
    ]
    yield _table(("from", "to", "latency", "spread", "GB/s", "spread"), ways)
    yield _wirings(choice)
    flows = [
        (row.kind, f"{a} > {b}", f"{rate:.4g}", f"{bytes_ / guess_s * 1e-9:.4g}")
        for row, guesses_s in zip(found.together, choice.taken.predicted_s, strict=True)
        for (a, b), rate, bytes_, guess_s in zip(
            row.flows, row.rates_gb_per_s, row.bytes_, guesses_s, strict=True
        )
    ]
    yield _table(("at the same time", "flow", "GB/s", "by the wiring"), flows)
    reductions = [
        (
            f"{len(names)}: {names[0]}{', ' if len(names) == 2 else ' … '}{names[-1]}",
            f"{error.reduction.bytes_:,}",
            format_seconds(error.predicted_s),
            format_seconds(error.reduction.seconds),
            f"{error.ratio:.2f}",
        )
        for error in reduction_errors(choice.taken.topology.cluster, found.reductions)
        for names in [error.reduction.devices]
    ]
    head = ("all-reduce among", "bytes", "predicted", "measured", "measured / predicted")
    yield _table(head, reductions)


def _wirings(choice: TopologyChoice) -> list[str]:
    """Return the best variant of each shape, the chosen one first."""
    order = sorted(choice.judged, key=lambda row: (not row.explains, row.together or 0.0))
    shapes = {row.topology.shape: row for row in reversed(order)}
    others = [row for row in shapes.values() if row.topology.shape != choice.taken.topology.shape]
    rows = [
        (
            row.topology.title,
            f"{abs(row.worst.bandwidth):.1%}",
            str(sum(not error.is_within for error in row.errors)),
            "" if row.together is None else shown_spread(row.together),
        )
        for row in (choice.taken, *others)
    ]
    head = ("wiring: the first was chosen", "bandwidth off by", "pairs not explained")
    return _table((*head, "flows at the same time off by"), rows)


def shown_spread(spread: float) -> str:
    """Return a spread in per cent; that of a fit through noise has no bound."""
    return f"{spread:.0%}" if spread < MOST_SPREAD else f"over {MOST_SPREAD:.0%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return columns as wide as they need; nothing without rows."""
    if not rows:
        return []
    shown = [head, *rows[:MOST_ROWS]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in shown]
    return lines + [f"and {len(rows) - MOST_ROWS} more (--json has all)"] * (len(rows) > MOST_ROWS)


# --- JSON -----------------------------------------------------------------------------------------


def _device_data(options: MeasurementOptions, backend: str, found: Measurements) -> dict[str, Any]:
    return {
        "cluster": str(options.output),
        "backend": backend,
        "devices": [asdict(member) for member in found.members],
        "device_types": {name: row.model_dump(mode="json") for name, row in found.types.items()},
        "slowdowns": {host: list(factors) for host, factors in found.slowdowns.items()},
        "beside": {name: asdict(row) for name, row in found.beside.items()},
    }


def _link_data(found: Measurements, choice: TopologyChoice) -> dict[str, Any]:
    taken = choice.taken
    return {
        "ways": [asdict(way) for way in found.ways.values()],
        "missing_pairs": [list(ends) for ends in found.missing],
        "wiring": taken.topology.title,
        "wirings": [
            {
                "title": row.topology.title,
                "explains_pairs": row.explains,
                "worst_bandwidth_error": row.worst.bandwidth,
                "together_error": _finite(row.together),
            }
            for row in choice.judged
        ],
        "together": [
            {**asdict(row), "predicted_s": [_finite(guess_s) for guess_s in guesses_s]}
            for row, guesses_s in zip(found.together, taken.predicted_s, strict=True)
        ],
        "all_reduces": [
            {**asdict(error.reduction), "predicted_s": error.predicted_s}
            for error in reduction_errors(taken.topology.cluster, found.reductions)
        ],
    }


def _finite(value: float | None) -> float | None:
    """JSON has no word for no path, whose error or time is infinite or next to it."""
    return value if value is not None and value < 1e6 else None
