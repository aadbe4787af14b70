"""Bytes of gradients: as they are held, and as they are reduced."""

from planner.job import LOW_PRECISION, Job
from planner.model.graph_record import Parameter


def sums_in_float32(job: Job) -> bool:
    """Return whether weights of 16 bits have gradients of 32."""
    return job.precision in LOW_PRECISION and job.gradient_precision != "weights"


def gradient_bytes(job: Job, parameter: Parameter) -> int:
    """Return the bytes of a parameter's gradient, as it is kept and reduced.

    That of 16-bit weights is float32 unless the job says otherwise, as in Megatron-LM
    (``accumulate_allreduce_grads_in_fp32``) and FSDP2 (``reduce_dtype``).
    """
    widens = job.gradient_precision != "weights" and parameter.bytes <= 2 * parameter.elements
    return 4 * parameter.elements if widens else parameter.bytes


def least_reduced_bytes(job: Job, parameter: Parameter) -> int:
    """Return the bytes of a parameter in a bound on the time of its reductions.

    It is those of the gradient; where devices share the optimizer's state, the mean of the gradient
    that they reduce and scatter, and of the parameter that they gather: both together take as long
    as an all-reduce of that by a ring.
    """
    bytes_ = gradient_bytes(job, parameter)
    return (bytes_ + parameter.bytes) // 2 if job.shards_state else bytes_
