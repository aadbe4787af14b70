"""Strategies of synchronisation, real and simulated."""
