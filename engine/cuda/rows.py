"""The decoding rows as the device knows them: slots, positions, block tables; and what of it the host has told.

In a steady batch the device knows all it needs for the next step: it advances the positions itself. Only what changed
is sent: rows that come or go, tables that grew, positions after a preemption. One copy and one scatter, or nothing.
"""

import numpy as np
import torch
from torch import Tensor

from engine.plan import PlanRow
from engine.sampling_state import upload
from kernels.reference.step import DecodeRows

PADDING = -1


class DeviceRows:
    """Owns ``tensors`` (views of one int32 arena) and a copy on the host of all that was sent.

    ``place``, then ``send``: the changes of one step. Stream order makes them visible to the launches that follow only.
    """

    def __init__(
        self, num_slots: int, max_blocks: int, block_size: int, last_token_S: Tensor, device: torch.device
    ) -> None:
        self._num_slots, self._max_blocks = num_slots, max_blocks
        self._arena = torch.zeros(num_slots * (2 + max_blocks), dtype=torch.int32, device=device)
        rows, positions, tables = self._arena.split([num_slots, num_slots, num_slots * max_blocks])
        rows.fill_(PADDING)
        self.tensors = DecodeRows(rows, positions, tables.view(num_slots, max_blocks), last_token_S, block_size)
        self._row_slots = [PADDING] * num_slots
        self._positions = [0] * num_slots
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self._versions = [-1] * num_slots
        self._places: list[int] = []
        self._values: list[int] = []

    def place(self, decode: list[PlanRow], bucket: int, chunks: list[PlanRow]) -> None:
        """Make the first ``bucket`` rows the decode rows of this step, in order, padded; and know the chunks' tables.

        The step that is launched next advances the position of each decode row by one.
        """
        row_slots, positions = self._row_slots, self._positions
        for number, row in enumerate(decode):
            slot = row.slot
            if row_slots[number] != slot:
                row_slots[number] = slot
                self._set(number, slot)
            if positions[slot] != row.start:
                self._set(self._num_slots + slot, row.start)
            positions[slot] = row.start + 1
            if self._versions[slot] != row.blocks_version:
                self._update_table(row)
        for number in range(len(decode), bucket):
            if row_slots[number] != PADDING:
                row_slots[number] = PADDING
                self._set(number, PADDING)
        for row in chunks:
            self._update_table(row)

    def send(self) -> None:
        """Send what `place` found changed."""
        if not self._places:
            return
        places = np.array(self._places, dtype=np.int64)
        values = np.array(self._values, dtype=np.int32)
        self._places, self._values = [], []
        at, new = upload([places, values], self._arena.device)
        self._arena.index_copy_(0, at, new)

    def _set(self, place: int, value: int) -> None:
        self._places.append(place)
        self._values.append(value)

    def _update_table(self, row: PlanRow) -> None:
        """Stage the entries that changed since this slot's table was sent."""
        slot, blocks = row.slot, row.blocks
        self._versions[slot] = row.blocks_version
        known = self._tables[slot]
        start = 2 * self._num_slots + slot * self._max_blocks
        for index, block in enumerate(blocks):
            if index >= len(known) or known[index] != block:
                self._set(start + index, block)
        self._tables[slot] = list(blocks)
