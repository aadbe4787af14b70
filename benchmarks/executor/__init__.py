"""The executor: parity with one process, overhead, peers, and predictions on shaped links."""
