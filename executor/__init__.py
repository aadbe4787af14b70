"""Runs a plan: ``torchrun --nproc-per-node N -m executor plan.json``.

Needs torch and the planner's artifacts, no solver. From Python: :func:`executor.train.train`
inside a process that torchrun started.
"""
