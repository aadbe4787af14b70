"""The command line ``pipeplan``: a file a command or a purpose, joined in ``commands``.

Exit status: 0 done; 1 the input is wrong, the plan does not hold or none exists; 2 wrong usage.
Hands out ``app`` and ``main``, the entry point.
"""

from planner.cli.commands import app, main

__all__ = ["app", "main"]
