"""Plans for people: charts, Perfetto traces, tables, plain data and HTML pages."""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """This package, which is called as the function of its name: ``planner.report(plan, path)``."""

    def __call__(self, plan: Any, path: Any) -> None:
        """Write a plan as one HTML page that needs no network; see ``page.py``."""
        from planner.report.page import save_report

        save_report(plan, path)


sys.modules[__name__].__class__ = _Package
