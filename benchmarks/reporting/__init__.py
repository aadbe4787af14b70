"""What all benchmarks share: claims, tables, running and the page of results."""
