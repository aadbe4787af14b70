"""A plan as one HTML file that needs no network: interactive charts, each with a table.

``page`` puts it together; ``static`` holds the page's template, styles and scripts as they are.
Hands out ``report_html`` and ``save_report``.
"""

from planner.report.html.page import report_html, save_report

__all__ = ["report_html", "save_report"]
