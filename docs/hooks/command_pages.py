"""The page of all commands and options, generated from the programs' own parsers."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import typer.main

from executor.coordinator.__main__ import parser as coordinator_parser
from executor.detect.options import parser as detect_parser
from executor.launch.command_line import parser as executor_parser
from executor.profiling.__main__ import parser as profiling_parser
from planner.cli.commands import app
from planner.cli.inspect import calibration

Row = tuple[str, str, str, str]
"""Option, value, default and meaning."""
INTRODUCTION = """# Commands and options

This page is generated from the commands; `pipeplan COMMAND --help` prints the same. Replace values
in capitals by your own; *required* marks options without a default. For exit statuses and `--json`
see [Command-line conventions](cli_conventions.md).
"""
NOTES = {
    "profile": "It starts `python -m executor.profiling` and takes the same options.",
    "detect": "It starts `python -m executor.detect` and takes the same options.",
}


def command_page() -> str:
    """Return the page as Markdown."""
    group = typer.main.get_command(app)
    parts = [INTRODUCTION, "## pipeplan\n", *_table(map(_typer_row, group.params))]
    for name, command in _commands(group):
        parts += ["", f"## pipeplan {name}\n", inspect.cleandoc(command.help or ""), ""]
        if name in NOTES:
            parser = profiling_parser() if name == "profile" else detect_parser()
            parts += [NOTES[name], "", *_parser_parts(parser)]
            if name == "profile":
                params = calibration().params
                parts += ["", "Of a plan and its run:", "", *_usage("pipeplan profile", params)]
                parts += _table(map(_typer_row, params))
        else:
            parts += [*_usage(f"pipeplan {name}", command.params)]
            parts += _table(map(_typer_row, command.params))
    for title, parser in _programs():
        parts += ["", f"## {title}\n", (parser.description or "").replace("``", "`"), ""]
        usage = parser.format_usage().removeprefix("usage: ").split(" [-h]")[0]
        parts += [f"Usage: `{usage} [OPTIONS]`", "", *_parser_parts(parser)]
    return "\n".join(parts) + "\n"


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group and of the groups in it, with the words that name them."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _programs() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield "python -m executor", executor_parser()
    yield "python -m executor.coordinator", coordinator_parser()
    yield "python -m executor.detect", detect_parser()


def _usage(name: str, params: Iterable[Any]) -> list[str]:
    words = [_argument(param) for param in params if param.param_type_name == "argument"]
    return [f"Usage: `{' '.join([name, *words, '[OPTIONS]'])}`", ""]


def _argument(param: Any) -> str:
    word = param.metavar or param.name.upper()
    return word if param.required else f"[{word}]"


def _typer_row(param: Any) -> Row:
    if param.param_type_name == "argument":
        return _argument(param), "", "*required*" if param.required else "", param.help or ""
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    again = " (may be repeated)" if param.multiple else ""
    return names, _value(param) + again, _default(param), param.help or ""


def _value(param: Any) -> str:
    if param.is_flag:
        return ""
    kind = param.type_descriptor.annotation
    kind = (get_args(kind) or (kind,))[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    words = {Path: "FILE", int: "NUMBER", float: "NUMBER", str: "TEXT"}
    return f"`{param.metavar or words[kind]}`"


def _default(param: Any) -> str:
    if param.required:
        return "*required*"
    if isinstance(param.show_default, str):
        return param.show_default
    if param.is_flag or param.default is None:
        return ""
    value = param.default.value if isinstance(param.default, Enum) else param.default
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _parser_parts(parser: argparse.ArgumentParser) -> list[str]:
    return _table(_parser_row(action) for action in parser._actions if action.dest != "help")


def _parser_row(action: argparse.Action) -> Row:
    if not action.option_strings:
        return action.dest.upper(), "", "*required*", action.help or ""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = ""
    if action.choices is not None:
        value = ", ".join(f"`{choice}`" for choice in action.choices)
    elif action.nargs != 0:
        value = f"`{action.metavar or action.dest.upper()}`"
    # Their help tells defaults in words, since some depend on the machine.
    return names, value, "*required*" if action.required else "", action.help or ""


def _table(rows: Iterable[Row]) -> list[str]:
    lines = ["| | value | default | |", "|---|---|---|---|"]
    for row in rows:
        lines.append("| " + " | ".join(_cell(text) for text in row) + " |")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
