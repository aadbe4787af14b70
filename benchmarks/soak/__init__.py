"""Training under failures: what continues, and how long others wait."""
