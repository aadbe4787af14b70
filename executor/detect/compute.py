"""How fast this rank's device computes, alone and while other ranks of its host compute too."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from executor.detect.turns import Turn
from executor.distributed.host_tuning import keep_freed_memory
from executor.distributed.machines import hardware_name
from planner.cluster.hardware import GIB, ClassEfficiency, DeviceType
from planner.units import significant

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
REPEATS = 7
LONGEST_S = 0.4
"""An operation is repeated until it took so long; the median counts."""
ALONE_S = 1.0
"""Seconds for which the first rank of a host computes alone."""
TOGETHER_ROUNDS, TOGETHER_S = 25, 0.12
"""Rounds of computation by one rank and by several at the same time, and the seconds of each.

Many and short: on a virtual machine single rounds differ by a fifth, and medians of seven by 6 %.
"""
ROWS, WIDTH = 128, 768
"""Rows and width of the block that is trained to see how ranks slow each other.

The fewer rows, the more of its time is memory traffic, which is what ranks on cores of their own
contend for: on two cores 64 rows made 7 %, 128 rows 3 %, and the layers of models 1 to 4 %.
"""
_CPU_SIZES, _GPU_SIZES = (128, 384, 1024), (512, 2048, 8192)
_CPU_ELEMENTS, _GPU_ELEMENTS = 4_000_000, 128_000_000
BESIDE_ROUNDS, BESIDE_S = 15, 0.2
"""Rounds of computation alone, messages alone and both at once, and the seconds of each."""
FEWEST_ROUNDS = 4
"""Fewer rounds in which messages were whole tell no spread; very slow links may have none."""
_DIGITS = 4

BlocksWhile = Callable[[Callable[[], bool]], None]
"""Computes while messages move, as what it is given says."""


class Computation:
    """This rank's part in turns of computation.

    Args:
        device: that computes.
        host_ranks: ranks on its host, which share the host's memory if it is a CPU.
    """

    def __init__(self, device: torch.device, host_ranks: int) -> None:
        self._device, self._host_ranks = device, host_ranks

    def part(self, turn: Turn, meet: Callable[[], None], *, is_first: bool) -> dict[str, Any]:
        """Return what a turn shows of this rank, as plain JSON values.

        Args:
            turn: of all that compute.
            meet: waits until all of the turn's ranks are ready; called several times.
            is_first: whether this rank is the one that also computes alone.
        """
        if self._device.type == "cpu":
            keep_freed_memory()  # As in training.
        block = self._block()
        for _ in range(3):
            block()
        if len(turn.group) > 1:
            return self._together(block, meet, is_first=is_first)
        found: dict[str, Any] = {"block_s": self._block_s(block, ALONE_S)}
        found["figures"] = self.figures().model_dump(mode="json")
        return found

    # --- alone ------------------------------------------------------------------------------------

    def figures(self) -> DeviceType:
        """Measure throughput by precision and class of operation, memory bandwidth and overhead.

        Throughput in each precision is that of the largest product; efficiencies compare other
        operations in float32 with the largest product in float32. Of a product of size n, 2 n^3
        FLOPs count; of attention and convolutions those of forward and backward.
        """
        sizes = _GPU_SIZES if self._device.type == "cuda" else _CPU_SIZES
        overhead_s = self._overhead_s()
        # Other precisions may have no kernels of their own on a CPU, where large ones take minutes.
        others = sizes[-1:] if self._device.type == "cuda" else sizes[1:2]
        peak = {name: self._products(kind, others)[0] for name, kind in DTYPES.items()}
        small, middle, large = self._products(torch.float32, sizes)
        bandwidth = self._bytes_per_s()
        best = max(small, middle, large, peak["float32"])
        peak["float32"] = best
        ramp_up_s = max(0.0, 2 * sizes[0] ** 3 * (1 / small - 1 / middle) - overhead_s)
        total, reserved = self._memory_gib()
        attention, convolution = self._attention(), self._convolution()
        host_link = self._copied_bytes_per_s()
        return DeviceType(
            memory_gib=_digits(total),
            reserved_gib=_digits(reserved),
            memory_bandwidth_gb_per_s=_digits(bandwidth * 1e-9),
            peak_tflop_per_s={name: _digits(rate * 1e-12) for name, rate in peak.items()},
            efficiency=_share(middle / best),
            operation_overhead_us=_digits(overhead_s * 1e6),
            host_link_gb_per_s=None if host_link is None else _digits(host_link * 1e-9),
            by_class={
                "product": ClassEfficiency(ramp_up_us=_digits(ramp_up_s * 1e6)),
                "attention": ClassEfficiency(efficiency=_share(attention / best)),
                "convolution": ClassEfficiency(efficiency=_share(convolution / best)),
            },
            source="measured",
            hardware=hardware_name(self._device),
        )

    def _products(self, kind: torch.dtype, sizes: Sequence[int]) -> list[float]:
        """Return FLOPs a second of square products."""
        rates = []
        for size in sizes:
            a = torch.ones(size, size, dtype=kind, device=self._device)
            rates.append(2 * size**3 / self._median_s(lambda a=a: a @ a))  # type: ignore[misc]
        return rates

    def _overhead_s(self) -> float:
        one = torch.ones(1, device=self._device)

        def many() -> None:
            for _ in range(100):
                one.add_(1)

        return self._median_s(many) / 100

    def _bytes_per_s(self) -> float:
        """Return the bytes a second of an addition that reads two tensors and writes one."""
        count = _GPU_ELEMENTS if self._device.type == "cuda" else _CPU_ELEMENTS
        a, b = (torch.ones(count, device=self._device) for _ in range(2))
        return 3 * 4 * count / self._median_s(lambda: torch.add(a, b, out=a))

    def _copied_bytes_per_s(self) -> float | None:
        """Return the bytes a second of a copy from pinned memory; None if nothing is copied."""
        if self._device.type != "cuda":
            return None
        host = torch.ones(_GPU_ELEMENTS // 4, pin_memory=True)
        there = torch.empty_like(host, device=self._device)
        copy_s = self._median_s(lambda: there.copy_(host, non_blocking=True))
        return host.numel() * host.element_size() / copy_s

    def _attention(self) -> float:
        """Causal attention of 12 heads of 64, two products forward and five backward."""
        length = 1024 if self._device.type == "cuda" else 256
        query, key, value = (self._leaf(4, 12, length, 64) for _ in range(3))
        flops = 7 * 2 * 4 * 12 * length**2 * 64 / 2

        def train() -> None:
            made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            made.backward(torch.ones_like(made))  # type: ignore[no-untyped-call]

        return flops / self._median_s(train)

    def _convolution(self) -> float:
        """A 3 x 3 convolution of 64 channels, one forward and two backward."""
        edge = 112 if self._device.type == "cuda" else 56
        weight, image = self._leaf(64, 64, 3, 3), self._leaf(4, 64, edge, edge)
        flops = 3 * 2 * 4 * edge**2 * 64 * 64 * 9

        def train() -> None:
            made = functional.conv2d(image, weight, padding=1)
            made.backward(torch.ones_like(made))  # type: ignore[no-untyped-call]

        return flops / self._median_s(train)

    def _leaf(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.01, device=self._device, requires_grad=True)

    def _median_s(self, run: Callable[[], object]) -> float:
        """Return the median time of a run, repeated until LONGEST_S have passed."""
        run()
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < LONGEST_S:
            times.append(self._timed_s(run))
        return median(times)

    def _timed_s(self, run: Callable[[], object]) -> float:
        self._settle()
        begin_s = time.perf_counter()
        run()
        self._settle()
        return time.perf_counter() - begin_s

    def _settle(self) -> None:
        """Wait for what was computed; messages have a stream of their own, and may go on."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _memory_gib(self) -> tuple[float, float]:
        """Return the memory that this rank may count on, and what it holds before a model."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total / GIB, min((total - free) / GIB, total / GIB / 2)
        whole = host_memory_bytes() / GIB / self._host_ranks
        return whole, min(0.5, whole / 4)

    # --- together ---------------------------------------------------------------------------------

    def _block(self) -> Callable[[], None]:
        """Return the training of a block of two products, with gradients added up."""
        first, second = self._leaf(WIDTH, 4 * WIDTH), self._leaf(4 * WIDTH, WIDTH)
        rows = self._leaf(ROWS, WIDTH)

        def train() -> None:
            made = functional.gelu(rows @ first) @ second
            made.backward(rows.detach())  # type: ignore[no-untyped-call]

        return train

    def beside_messages(
        self,
        exchanging: Callable[[BlocksWhile], list[float]],
        meet: Callable[[], None],
        *,
        leads: bool,
    ) -> list[tuple[float, float]]:
        """Return how many times as long a block and messages take at once as alone, by round.

        Both ranks compute, as in training: the cores that messages need are then not idle.

        Args:
            exchanging: exchanges messages while what it is given runs, and returns their times.
            meet: waits for the other rank.
            leads: whether this rank measures; the other one finds nothing.

        Returns:
            Both ratios of each round in which messages were over within it.
        """
        block, ratios = self._block(), list[tuple[float, float]]()
        for _ in range(3):
            block()
        # Who leads ends the messages, and these end the work of the other.
        for_s = BESIDE_S if leads else math.inf
        for _ in range(BESIDE_ROUNDS):
            meet()
            blocks_s, beside_s = self._blocks_s(block, lambda: True), list[float]()
            meet()
            messages_s = exchanging(lambda _: time.sleep(BESIDE_S if leads else 0))
            meet()
            slowed_s = exchanging(
                lambda moves, found=beside_s: found.extend(  # type: ignore[misc]
                    self._blocks_s(block, moves, for_s)
                )
            )
            if leads and messages_s and slowed_s:
                times = median(beside_s) / median(blocks_s), median(slowed_s) / median(messages_s)
                ratios.append(times)
        return ratios

    def _blocks_s(
        self, block: Callable[[], None], goes_on: Callable[[], bool], for_s: float = BESIDE_S
    ) -> list[float]:
        """Return the times of the blocks of some seconds, each all within a condition."""
        begin_s, times = time.perf_counter(), list[float]()
        while len(times) < 2 or time.perf_counter() < begin_s + for_s:
            seconds = self._timed_s(block)
            if not goes_on():
                break
            times.append(seconds)
        return times

    def _together(
        self, block: Callable[[], None], meet: Callable[[], None], *, is_first: bool
    ) -> dict[str, list[float]]:
        """Return the times of a block, round by round: of the first rank alone, then of all.

        Both are measured in turn, since other work on the machine comes and goes within seconds.
        """
        found: dict[str, list[float]] = {"alone_s": [], "block_s": []}
        for _ in range(TOGETHER_ROUNDS):
            meet()
            if is_first:
                found["alone_s"].append(self._block_s(block, TOGETHER_S))
            meet()
            found["block_s"].append(self._block_s(block, TOGETHER_S))
        return found

    def _block_s(self, block: Callable[[], None], for_s: float) -> float:
        """Return the median time of a block within some seconds."""
        return median(self._blocks_s(block, lambda: True, for_s))


def host_memory_bytes() -> int:
    """Return the memory of this host that is free for ranks: what a container may use, if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total = int(rows["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


# --- what all ranks found -------------------------------------------------------------------------


def slowdowns(ratios: Mapping[int, float], ranks: int) -> tuple[float, ...]:
    """Return factors for one to all ranks of a host, from the times of a block.

    Args:
        ratios: how many times as long as alone it took while so many ranks computed; of one and of
            all at least. Numbers in between are interpolated.
        ranks: of the host.
    """
    counts = sorted(ratios)
    factors = np.interp(range(1, ranks + 1), counts, [ratios[count] for count in counts])
    rising = np.maximum.accumulate(np.maximum(factors, 1.0))
    return (1.0, *map(_digits, rising[1:].tolist()))


def _digits(value: float) -> float:
    return significant(value, _DIGITS)


def _share(value: float) -> float:
    return _digits(min(1.0, max(0.001, value)))
