"""Measurements turned into costs: layers' times and links' figures from a measured timeline.

Hands out :func:`planner.calibration.calibrate.calibrate`, and
:func:`planner.calibration.costs.with_measured_times` for a graph traced anew.
"""
