"""Running ``pipeplan`` inside the test's own process."""

from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from planner.cli.commands import app

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "examples" / "clusters"


def pipeplan(*arguments: object) -> Result:
    """Run a command; an exception that is not its own way out is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output
    return result
