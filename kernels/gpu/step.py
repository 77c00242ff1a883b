"""The first kernel of a decode step: from device slots to the inputs of the layers."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.step import DecodeInputs, DecodeRows

BLOCK = 1024


def begin_decode(rows: DecodeRows, embedding_VH: Tensor, cos_sin_PD: Tensor, inputs: DecodeInputs) -> None:
    """As `kernels.reference.step.begin_decode`. One program per row; no slot may stand in two rows."""
    (B, H), D = inputs.x_BH.shape, cos_sin_PD.shape[1]
    _begin_decode[(B,)](
        rows.row_slots_B, rows.positions_S, rows.block_tables_SM, rows.last_token_S, embedding_VH, cos_sin_PD,
        inputs.x_BH, inputs.cos_sin_BD, inputs.kv_slots_B, inputs.context_lens_B, inputs.next_positions_B,
        rows.block_tables_SM.stride(0), embedding_VH.stride(0), inputs.x_BH.stride(0), inputs.cos_sin_BD.stride(0),
        H=H, D=D, D_PAD=triton.next_power_of_2(D), BLOCK=BLOCK, BLOCK_SIZE=rows.block_size, num_warps=4,
    )  # fmt: skip


@triton.jit
def _begin_decode(
    row_slots, positions, tables, last_token, embedding, cos_sin, x, cos_sin_rows, kv_slots, lens, next_positions,
    stride_table, stride_embedding, stride_x, stride_cos_sin,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    slot = tl.load(row_slots + b).to(tl.int64)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    position = tl.load(positions + slot)
    token = tl.load(last_token + slot).to(tl.int64)
    block = tl.load(tables + slot * stride_table + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(kv_slots + b, tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1))
    tl.store(lens + b, tl.where(live, position + 1, 0))
    tl.store(next_positions + b, (position + 1).to(tl.int64))
    d = tl.arange(0, D_PAD)
    turns = tl.load(cos_sin + position.to(tl.int64) * D + d, mask=d < D, other=0.0)
    tl.store(cos_sin_rows + b * stride_cos_sin + d, turns.to(tl.float32), mask=d < D)
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)
        e = tl.load(embedding + token * stride_embedding + h, mask=(h < H) & live, other=0.0)
        tl.store(x + b.to(tl.int64) * stride_x + h, e.to(tl.float32), mask=h < H)
    # Read above by every thread before one of them writes it: a program's reads of one address are one broadcast.
    tl.debug_barrier()
    tl.store(positions + slot, position + 1, mask=live)
