"""The same schedules under torch.distributed.pipelining and under the executor, side by side.

:mod:`benchmarks.peers.cases` says what is run, :mod:`benchmarks.peers.worker` is one rank of it.
"""
