"""Seconds of compute from what a trace counted, for devices that are not here."""

from __future__ import annotations

from ..types import BlockTimes, Hardware, Layout, Trace, Work

UPDATE_PASSES = 7
"""AdamW reads weight, gradient and both moments, and writes all but the gradient."""


def work_s(work: Work, hardware: Hardware) -> float:
    """A roofline for each kind of operator; kernels cannot be launched faster."""
    busy = (
        work.flops_16 / hardware.flops_16
        + work.flops_32 / hardware.flops_32
        + work.moved_bytes / hardware.memory_bytes_s
    )
    return max(busy, work.num_kernels * hardware.kernel_s)


def update_seconds(nbytes: int, hardware: Hardware) -> float:
    """AdamW on the device for that many bytes of weights."""
    return UPDATE_PASSES * nbytes / hardware.memory_bytes_s


def block_times(trace: Trace, layout: Layout, hardware: Hardware) -> BlockTimes:
    """Times of all blocks by the roofline."""
    forward = [0.0] * trace.num_blocks
    backward = [0.0] * trace.num_blocks
    outside = {False: 0.0, True: 0.0}
    for segment in trace.segments:
        seconds = work_s(segment.work, hardware)
        if segment.block is None:
            outside[segment.backward] += seconds
        elif segment.backward:
            backward[segment.block] += seconds
        else:
            forward[segment.block] += seconds
    return BlockTimes(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        outside_forward_s=outside[False],
        outside_backward_s=outside[True],
        update_s=update_seconds(layout.fixed_trainable_bytes, hardware),
        measured=False,
    )
