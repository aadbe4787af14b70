"""One stage on one rank: its forwards, whole and split backwards, recomputation, statistics.

Hands out :class:`executor.stage.runner.StageRunner`.
"""
