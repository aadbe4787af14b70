"""Orders of the operations of given stages: list schedules, annealing, CP-SAT.

``search_schedule`` is the public search; ``OrderSearch`` is what a search of plans takes of it.
Compiled code works on the block :data:`planner.search.orders.memory.ORDERS`.
"""
