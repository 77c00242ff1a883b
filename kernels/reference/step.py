"""The first kernel of a decode step, in plain torch: from device slots to the inputs of the layers."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Which outputs decode, and where they stand. Shapes: B rows of the step, S slots, M blocks of a table.

    ``row_slots_B`` int32: the slot of each row, -1 for padding. ``positions_S`` int32: the position of each slot's
    next input token. ``block_tables_SM`` int32. ``last_token_S`` int64: that input token.
    """

    row_slots_B: Tensor
    positions_S: Tensor
    block_tables_SM: Tensor
    last_token_S: Tensor
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """What the layers of a decode step read, one row each; H hidden, D head_dim.

    ``x_BH`` float32: the embedded token, start of the residual stream. ``cos_sin_BD`` float32. ``kv_slots_B`` int64:
    where the token's KV goes, -1 for padding. ``context_lens_B`` int32: tokens attended, 0 for padding.
    ``next_positions_B`` int64: the position of the token that will be sampled.
    """

    x_BH: Tensor
    cos_sin_BD: Tensor
    kv_slots_B: Tensor
    context_lens_B: Tensor
    next_positions_B: Tensor


def begin_decode(rows: DecodeRows, embedding_VH: Tensor, cos_sin_PD: Tensor, inputs: DecodeInputs) -> None:
    """Fill ``inputs`` for ``rows`` and advance each row's position by one. A padded row's ``x`` is 0."""
    live_B = rows.row_slots_B >= 0
    slots_B = rows.row_slots_B.clamp(min=0).long()
    positions_B = rows.positions_S[slots_B].long()
    embedded = embedding_VH[rows.last_token_S[slots_B]].float()
    inputs.x_BH.copy_(embedded.masked_fill_(~live_B[:, None], 0))
    inputs.cos_sin_BD.copy_(cos_sin_PD[positions_B])
    blocks_B = rows.block_tables_SM[slots_B, positions_B // rows.block_size].long()
    kv_slots_B = blocks_B * rows.block_size + positions_B % rows.block_size
    inputs.kv_slots_B.copy_(torch.where(live_B, kv_slots_B, -1))
    inputs.context_lens_B.copy_(torch.where(live_B, positions_B + 1, 0))
    inputs.next_positions_B.copy_(positions_B + 1)
    rows.positions_S.index_add_(0, slots_B[live_B], torch.ones_like(slots_B[live_B], dtype=torch.int32))
