"""One command a claim. Each prints a Markdown report with machine, date and versions."""
