"""Training: data, iterations of a plan, the optimizer, and what is reported of each step."""
