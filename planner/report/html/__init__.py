"""A plan as one HTML file that needs no network: interactive charts, each with a table.

``page`` puts it together; ``static`` holds the page's template, styles and scripts as they are.
"""
