"""One command a claim. Each prints a Markdown report with machine, date and versions."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
SAMPLE_CLUSTERS = ROOT / "examples" / "clusters"
"""The sample clusters."""
