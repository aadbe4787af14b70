"""``pipeplan detect``: a cluster file from what devices and links do.

``options`` reads the command line, ``turns`` decides who computes or talks when, ``compute`` times
computation, ``probe`` messages and all-reduces, ``run`` leads through all of it, ``record`` keeps
the results, and ``report`` writes and prints them. :mod:`planner.topology` concludes the cluster.
"""
