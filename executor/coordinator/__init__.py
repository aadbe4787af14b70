"""One small process that tells pipelines who averages with whom and which share of data is next.

What it decides is a pure state machine (:mod:`executor.coordinator.state`); around it are messages
over a store, signs of life, and a log from which it goes on after a restart.
"""
