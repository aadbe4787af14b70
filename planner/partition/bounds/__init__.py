"""Lower bounds: of one partition over all schedules, and of all partitions.

``schedule``, ``in_flight`` and ``link_loads`` bound every schedule of a partition (``quick`` is
the first of them for searches); ``work``, ``relaxed_cluster`` and ``priced_cluster`` bound every
partition.
"""
