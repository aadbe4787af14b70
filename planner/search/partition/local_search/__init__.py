"""Local search: one loop, one neighbourhood.

``loop`` has the loop and its rules of acceptance, ``neighbourhood`` the changes of a partition.
``searches`` polishes and anneals partitions by their quick bounds and improves orders of the
devices; planner.search.local_search judges partitions by their schedules.
"""
