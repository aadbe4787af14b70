"""Claims about strategies of synchronisation, from any section of that benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator

from benchmarks.reporting.claims import Claim as Told
from benchmarks.reporting.claims import Entry, LeftOut, details
from benchmarks.sync.claims import Claim, Outcome
from benchmarks.sync.loopback import SETTINGS

PARTIAL = "Ripples/Prague: 2x and 4.4x all-reduce with slow workers; other bars are our own"
LINKS = "Ripples: 1.1x all-reduce, 5.1x parameter server, 4.3x AD-PSGD with equal workers"
JIN = "Jin's thesis (HKU 2023): 29.2 % faster than all-reduce; worst case and loss: our own bars"
SERVERS = "Jin's thesis, PS+: 54 % less time an iteration, 37 % fewer iterations"
SDPIPE = "SDPipe (VLDB 2023): faster than any other strategy under random sleeps"
SIMULATOR = "our own bar"
SOURCES = {
    "loopback": PARTIAL,
    "accuracy": SIMULATOR,
    "shaped": f"{LINKS}; {JIN}",
    "legs": SIMULATOR,
    "predicted": SIMULATOR,
    "pipelines": SDPIPE,
    "modulations": SERVERS,
    "rivals": "HetPipe: waves and a bound on the distance; Ripples: its filter; our own bars",
    "links": LINKS,
    "slow": "Ripples: 2x all-reduce, 3x parameter server; Prague: 4.4x all-reduce; with slow ones",
    "sleeps": SDPIPE,
    "servers": SERVERS,
    "choice": SIMULATOR,
    "overlap": JIN,
    "scale": SIMULATOR,
}
"""The source of each section: papers as read in their text, or our own simulator."""


def entries(section: str, title: str, outcome: Outcome) -> Iterator[Entry]:
    """Claims and the table of a section.

    Args:
        section: by the name that ``--rows`` takes.
        title: over its table.
        outcome: what it came to.
    """
    yield from (claim_of(claim, SOURCES[section]) for claim in outcome.claims)
    if outcome.rows:
        yield details(title, outcome.columns, outcome.rows)


def left_out(
    known: Collection[str], names: Collection[str], options: argparse.Namespace
) -> Iterator[LeftOut]:
    """Yield the parts of the full benchmark that were not run.

    Args:
        known: all its sections.
        names: those that were run.
        options: of the command line.
    """
    missing = [name for name in known if name not in names]
    if missing:
        yield LeftOut(text="sections " + ", ".join(missing))
    if options.settings:
        rest = [name for name in SETTINGS if name not in options.settings]
        yield LeftOut(text="on loopback " + ", ".join(rest))
    if options.short:
        yield LeftOut(text="all seeds but one, some strategies and sizes")


def claim_of(claim: Claim, source: str) -> Told:
    """Return the claim with its runs, its seeds and its note in words."""
    found = claim.found
    spread = ""
    if found is None:
        spread = "no run got there"
    elif len(found.values) > 1:
        spread = f"{len(found.values)} values, {found.least:.3g} to {found.most:.3g}"
    unequal = ""
    if found is not None and not claim.has_equal_loss:
        unequal = f"{found.mean:.3g}, but at {claim.loss} of the rival's held-out loss"
    kind = "real" if claim.is_real else "simulated"
    return Told(
        claim=claim.text,
        source=source,
        regime=f"{kind}: {claim.regime}",
        sense="at most" if claim.at_most else "at least",
        bar=claim.bar,
        # At another held-out loss there is nothing to compare with the bar.
        figure=found.mean if found is not None and claim.has_equal_loss else None,
        note=" ".join(part for part in (spread, claim.note, unequal) if part),
    )
