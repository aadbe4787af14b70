"""What an iteration time means: samples and tokens a second, share of peak FLOPs, cost, epochs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from planner.cluster.cluster import Cluster
from planner.job import Job
from planner.model.graph_record import GraphRecord

SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True)
class Throughput:
    """Figures of an iteration; None where something they need is not known.

    Attributes:
        samples_per_s: of all microbatches.
        tokens_per_s: if the job's inputs list a sequence of tokens.
        mfu: model FLOPs utilisation: FLOPs of one forward and backward of all samples, nothing
            recomputed, per second, as a share of the peak of all devices in use at the job's
            precision (Chowdhery et al. 2022, "PaLM", appendix B). None without such a peak.
        cost_per_million_samples: of the devices that are paid for, in the cluster's currency; None
            if one has no price.
        epoch_s: if the job has the size of its data set.
        cost_per_epoch: in the cluster's currency; None without that size or a price.
    """

    samples_per_s: float
    tokens_per_s: float | None
    mfu: float | None
    cost_per_million_samples: float | None
    epoch_s: float | None
    cost_per_epoch: float | None


def throughput(
    graph: GraphRecord,
    cluster: Cluster,
    job: Job,
    devices: Collection[str],
    iteration_time_s: float,
) -> Throughput | None:
    """Return what an iteration of some length means; None if it takes no time.

    Args:
        graph: of the model.
        cluster: with the devices' peaks and prices.
        job: microbatches, precision, inputs and the size of the data set.
        devices: in use.
        iteration_time_s: predicted or measured.
    """
    if iteration_time_s <= 0:
        return None
    samples_per_s = job.samples_per_microbatch * job.microbatches / iteration_time_s
    tokens, peak = job.tokens_per_sample, _peak_flop_per_s(cluster, job, devices)
    flops = job.microbatches * _flops(graph)
    price = price_per_hour(cluster, devices)
    cost = None if price is None else cost_per_million_samples(1 / samples_per_s, price)
    epoch = job.epoch_samples
    return Throughput(
        samples_per_s=samples_per_s,
        tokens_per_s=None if tokens is None else tokens * samples_per_s,
        mfu=None if not peak else flops / (peak * iteration_time_s),
        cost_per_million_samples=cost,
        epoch_s=None if epoch is None else epoch / samples_per_s,
        cost_per_epoch=None if epoch is None or cost is None else cost * epoch / 1e6,
    )


def _flops(graph: GraphRecord) -> float:
    """Return the FLOPs of a microbatch, in the mean over lengths."""
    if not graph.lengths:
        return float(sum(layer.flops for layer in graph.layers))
    rows = (row for layer in graph.layers for row in layer.lengths)
    return sum(row.share * work.flops for row in rows for work in row.work)


def _peak_flop_per_s(cluster: Cluster, job: Job, devices: Collection[str]) -> float | None:
    """Return the peak of all devices at the job's precision; None if a type does not give it."""
    kinds = [cluster.device_type(device) for device in devices]
    peaks = [kind.peak_tflop_per_s.get(job.precision) for kind in kinds]
    known = [peak for peak in peaks if peak is not None]
    return 1e12 * sum(known) if len(known) == len(peaks) else None


def price_per_hour(cluster: Cluster, devices: Collection[str]) -> float | None:
    """Return the price of all devices, in the cluster's currency; None if one has none."""
    prices = [cluster.prices_per_hour[device] for device in devices]
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


def cost_per_million_samples(time_per_sample_s: float, price_per_hour: float) -> float:
    """Return the cost of a million samples, in the currency of the price."""
    return 1e6 * time_per_sample_s * price_per_hour / SECONDS_AN_HOUR
