"""The command line ``pipeplan``, with one file per command; ``commands`` registers them all.

Exit status: 0 done; 1 the input is wrong, the plan does not hold or none exists; 2 wrong usage;
130 interrupted.
"""


def main() -> None:
    """Entry point of the command ``pipeplan``."""
    # Ctrl-C ends a command, as user_errors says; this is for those before it, while modules load.
    try:
        from planner.cli.commands import run

        run()
    except KeyboardInterrupt:
        import sys

        from planner.errors import INTERRUPTED

        sys.stderr.write("interrupted\n")
        raise SystemExit(INTERRUPTED) from None
