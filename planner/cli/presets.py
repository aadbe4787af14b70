"""``pipeplan presets``."""

from __future__ import annotations

from planner.cli.options import JsonOption
from planner.cli.output import print_json, print_rich, user_errors


def presets(as_json: JsonOption = False) -> None:
    """List the devices and links that cluster files can name, with their sources."""
    with user_errors(as_json):
        from planner.report.presets import preset_data, preset_tables

        if as_json:
            print_json(preset_data())
            return
        for table in preset_tables():
            print_rich(table)
