"""``pipeplan detect``: a cluster file from what devices and links do.

``options`` reads the command line, ``turns`` decides who computes or talks when and passes the turn
on, ``compute`` times computation, ``probe`` messages and all-reduces, ``run`` leads through all of
it, and ``report`` writes and prints the results. The cluster is concluded from the figures by
:mod:`planner.topology`.
"""
