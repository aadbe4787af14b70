"""Solver of dnn-partitioning's problem: node placements with the least largest load.

The entry point is :func:`~benchmarks.placement.solver.solve.solve_loads`. ``instance`` holds the
data, ``evaluator`` checks results without sharing code with the solvers, and ``cp_model`` is the
CP-SAT model.
"""
