"""Asking the L2 cache for weights that a later kernel reads, while this one leaves the memory idle.

A decode step is a stream of weights, broken by kernels that wait rather than read: attention, norms. `cp.async.bulk`
in its prefetch form (PTX ISA, sm_90) takes a whole range per thread and needs no registers or shared memory for it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """The first ``bytes_each`` bytes of each of ``parts`` equal parts of ``weight``; multiples of 16.

    Two parts for stacked weights (gate over up), whose rows are read side by side.
    """

    weight: Tensor
    bytes_each: int
    parts: int = 1

    @property
    def part_stride(self) -> int:
        """Bytes from one part to the next."""
        return self.weight.nbytes // self.parts


@triton.jit
def prefetch_l2(base, bytes_each, part_stride, program, num_programs, PARTS: tl.constexpr, THREADS: tl.constexpr):
    """This program's share of a `Prefetch`. ``THREADS``: of the program, so that each thread asks once."""
    per_thread = tl.cdiv(bytes_each, num_programs * THREADS * 16) * 16
    start = (program * THREADS + tl.arange(0, THREADS)) * per_thread
    size = tl.minimum(tl.maximum(bytes_each - start, 0), per_thread)
    for part in tl.static_range(PARTS):
        address = base.to(tl.pointer_type(tl.uint8)) + part * part_stride.to(tl.int64) + start
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [address, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
