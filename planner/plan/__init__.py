"""The plan and its inputs: problem, operations, sweep index, moves, and the run command."""
