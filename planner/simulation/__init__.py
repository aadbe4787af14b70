"""Simulation of a plan: replay, timeline, critical path, fairly shared links, and noise."""
