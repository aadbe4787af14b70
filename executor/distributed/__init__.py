"""Processes that work together: process groups, failures, signals."""
