"""The CP-SAT model of the microbatch schedule; ``model`` puts its parts together."""
