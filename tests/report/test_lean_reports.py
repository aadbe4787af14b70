"""The report rooms load matplotlib and rich only when they draw."""

import subprocess
import sys

import pytest
from builders import ROOT

pytestmark = pytest.mark.extensive

MODULES = ("gantt", "memory_plot", "chrome_trace", "summary", "explanation", "page")


def test_importing_the_reports_loads_no_drawing_library():
    code = (
        f"import sys, {', '.join(f'planner.report.{name}' for name in MODULES)}\n"
        "print([name for name in ('matplotlib', 'rich', 'torch', 'jinja2') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
