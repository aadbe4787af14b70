"""The command line ``pipeplan``, with one file per command; ``commands`` registers them all.

Exit status: 0 done; 1 the input is wrong, the plan does not hold or none exists; 2 wrong usage.
Hands out ``app`` and ``main``, the entry point.
"""

from planner.cli.commands import app, main

__all__ = ["app", "main"]
