"""Hostile plans, files, messages and callers in large numbers: nothing wrong passes, nothing ends.

Usage:
    python -m benchmarks.soak.hostile [--number N] [--only plans|messages|files|callers]

Plans and messages are the property tests of ``tests/`` with hypothesis' profile ``soak``. Files are
those of every format with bytes and values changed (:mod:`benchmarks.soak.files`). Callers attack a
rank's tensor server: garbage, half-open connections, overheard proofs, and frames that announce
terabytes. Each part is told as it ends. Ends with status 1 if anything failed, or the server took
200 MB more than at its beginning.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.soak.files import fuzzed
from executor.elastic.tensor_calls import TensorClient, TensorServer, greet

MOST_MORE_MB = 200
_AT_A_TIME = 500
KEY = b"the key of a training"
TESTS = {
    "plans": ("tests/verifier/test_edited_plans.py", 10),
    "messages": ("tests/coordinator/test_hostile_messages.py", 1),
}
"""The file of property tests, and how many edits or sequences of messages an example tries."""


def main(argv: Sequence[str] | None = None) -> int:
    """Attack; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.hostile", description=__doc__)
    parser.add_argument("--number", type=int, default=10_000, help="of each kind")
    parser.add_argument("--only", choices=[*TESTS, "files", "callers"])
    options = parser.parse_args(argv)
    statuses = [
        _tested(name, *TESTS[name], options.number)
        for name in TESTS
        if options.only in (None, name)
    ]
    if options.only in (None, "files"):
        statuses.append(_fuzzed(options.number))
    if options.only in (None, "callers"):
        statuses.append(_called(options.number))
    return max(statuses)


def _fuzzed(number: int) -> int:
    """Read changed files, and tell of each part of them: a run that is ended has told its own."""
    failed = False
    for first in range(0, number, _AT_A_TIME):
        outcome = fuzzed(min(_AT_A_TIME, number - first), seed=first)
        failed |= bool(outcome.faults)
        for fault in outcome.faults:
            print(fault, file=sys.stderr)
        print(
            f"files {first} to {first + outcome.counts.total() - 1}: {outcome.counts['read']} "
            f"read, {outcome.counts['refused']} refused, {len(outcome.faults)} faults; "
            f"{outcome.most_s:.1f} s and {outcome.most_more_mb:.0f} MB at most",
            flush=True,
        )
    return int(failed)


def _tested(name: str, path: str, of_each: int, number: int) -> int:
    """Try so many edits or sequences in each property test of a file; tell of each part of them."""
    words = ["-q", "-n", "0", "--timeout", "0", "--show-capture", "no"]
    words += ["--hypothesis-profile", "soak", path]
    worst = 0
    for first in range(0, number, _AT_A_TIME):
        count = min(_AT_A_TIME, number - first)
        env = {**os.environ, "PIPEPLAN_SOAK_EXAMPLES": str(-(-count // of_each))}
        command = [sys.executable, "-m", "pytest", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        worst = max(worst, abs(done.returncode))
        ended = "hold" if done.returncode == 0 else f"FAIL\n{done.stdout}{done.stderr}"
        most_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        part = f"{name} {first} to {first + count - 1}"
        print(f"{part} of each property ({most_mb:.0f} MB at most): {ended}", flush=True)
    return worst


def _called(connections: int) -> int:
    """Attack a server, and call it as a rank would now and then."""
    server = TensorServer("127.0.0.1", KEY, most_callers=8)
    server.handle("same", lambda header, tensors: ({}, tensors), 2**20)
    rng, held = random.Random(0), []
    before_mb = _most_mb()
    for number in range(connections):
        held.append(_attack(server, rng))
        if len(held) > 100:
            held.pop(rng.randrange(len(held))).close()
        if number % 100 == 0:
            client = TensorClient(server.address, KEY, 30.0)
            client.call("same")
            client.close()
    more_mb = _most_mb() - before_mb
    print(f"{connections} connections: {more_mb:.0f} MB more, every call answered")
    return int(more_mb > MOST_MORE_MB)


def _attack(server: TensorServer, rng: random.Random) -> socket.socket:
    """Open a connection and misuse it; it stays open."""
    host, _, port = server.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), 30.0)
    kind = rng.choice(["silent", "garbage", "much", "announced"])
    with suppress(Exception):  # The server may end it at any byte.
        if kind == "garbage":
            connection.sendall(rng.randbytes(rng.randint(1, 200)))
        elif kind == "much":
            connection.sendall(bytes(2**20))
        elif kind == "announced":
            greet(connection, KEY)
            header = b'{"call": "same", "tensors": [["uint8", [1099511627776]]]}'
            length = rng.choice([len(header), 2**60])
            connection.sendall(struct.pack("!Q", length) + header)
            connection.recv(4096)
    return connection


def _most_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
