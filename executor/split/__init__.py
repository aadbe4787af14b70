"""Cutting the exported training step into the stages of a plan.

Hands out :func:`executor.split.model_split.cut`.
"""
