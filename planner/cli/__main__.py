"""``python -m planner.cli``."""

from planner.cli.commands import main

if __name__ == "__main__":
    main()
