"""Costs from measurements: layer times and link figures from a measured timeline or profiles.

The entry points are :func:`planner.interop.calibrate.calibrate.calibrate`, for a measured run of a
plan, and :func:`planner.interop.calibrate.costs.with_measured_times`, for a newly traced graph.
"""
