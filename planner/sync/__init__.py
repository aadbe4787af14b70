"""Synchronisation of pipeline replicas: strategies, group schedulers, simulation and the choice.

Nothing here imports torch; the executor uses the same strategies and schedulers.
"""
