"""Stage partition, device mapping and replication: bounds, a dynamic program and CP-SAT."""
