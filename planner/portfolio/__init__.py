"""The steps of :func:`planner.solve`, in the order they are taken.

``search`` holds what all share: candidates, incumbent, bound. ``first_plans`` schedules warm
starts, classic planners' partitions and those of the partition optimiser; ``descent`` and
``annealing`` improve the best by small changes; ``exact`` lets CP-SAT improve schedules and
partitions and prove a bound; ``robust`` may prefer a plan that keeps its time under noise.
"""
