"""The same schedules under torch.distributed.pipelining and under the executor, side by side.

:mod:`benchmarks.executor.peers.cases` says what is run, :mod:`benchmarks.executor.peers.worker` is
one rank of it.
"""
