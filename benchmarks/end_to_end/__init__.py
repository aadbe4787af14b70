"""Time and quality from a torch model to a plan: tracing times, import times and gaps."""
