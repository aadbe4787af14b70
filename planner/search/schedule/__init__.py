"""Microbatch order on every device: classic schedules, a list scheduler and CP-SAT."""
