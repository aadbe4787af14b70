"""Pipeplan against published planners and schedules on public profiles."""
