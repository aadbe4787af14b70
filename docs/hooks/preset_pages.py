"""The page of presets, generated from their tables."""

from __future__ import annotations

from planner.report.presets import preset_tables

INTRODUCTION = """# Presets of devices and links

`pipeplan detect --presets` prints the same. Peaks are dense and accumulate in float32; GiB are as
reported by the driver where that is noticeably less than the datasheet's. A100-80GB and H100-80GB
are the SXM modules, MI250X is one of its two dies. `reached` is the fraction of peak that products,
convolutions and attention reach, and the fraction of memory bandwidth of all other operations.
Latencies of links are assumptions.
"""


def preset_page() -> str:
    """Return the page as Markdown."""
    return "\n\n".join([INTRODUCTION, *(table.markdown() for table in preset_tables())])
