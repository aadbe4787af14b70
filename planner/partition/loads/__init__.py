"""Placing a graph's nodes so that the largest device load is least: dnn-partitioning's problem.

Hands out :func:`~planner.partition.loads.solve.solve_loads` and, beside it, the instance
(``instance``), an evaluator that shares no code with the solvers (``evaluator``) and the CP-SAT
model (``cp_model``).
"""
