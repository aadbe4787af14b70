"""Clusters from measurements: the switches and links that explain measured messages."""
