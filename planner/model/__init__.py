"""The model: its layer graph, its measured costs, and tracing a torch module into a layer graph."""
