"""Block-granular KV storage: who holds which block. Pure Python, no torch.

A *logical* block is what a request holds; a *physical* block is a place in the GPU pool (on a CPU device, in
the same pool in host memory). The map between both lives here alone, so a block can move without its holder noticing.
"""

import itertools
from collections.abc import Iterable, Sequence


class NoFreeBlocks(Exception):
    """The pool has fewer free blocks than asked for; nothing was taken."""


class BlockManager:
    """A pool of ``num_blocks`` KV blocks with reference counts.

    A logical block is in exactly one state: free (count 0) or held (count = number of holders). Freeing the last
    reference returns it at once, and the most recently freed block is handed out first (its lines are warm).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free_logical = list(range(num_blocks - 1, -1, -1))
        self._free_physical = list(range(num_blocks - 1, -1, -1))
        self._physical: list[int] = [-1] * num_blocks
        self._ref_count: list[int] = [0] * num_blocks
        self._versions = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._free_physical)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """``count`` logical blocks with one reference each, all or nothing. Raises `NoFreeBlocks`."""
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self._free_logical.pop() for _ in range(count)]
        for block in blocks:
            self._physical[block] = self._free_physical.pop()
            self._ref_count[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each block."""
        for block in blocks:
            assert self._ref_count[block] > 0, f"block {block} is free and cannot be shared"
            self._ref_count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each block; the last one frees it."""
        for block in blocks:
            assert self._ref_count[block] > 0, f"block {block} is released twice"
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._free_physical.append(self._physical[block])
                self._physical[block] = -1
                self._free_logical.append(block)

    def is_shared(self, block: int) -> bool:
        return self._ref_count[block] > 1

    def new_version(self) -> int:
        """A number above 0 that no list of blocks had before."""
        return next(self._versions)

    def physical(self, block: int) -> int:
        """Where a held block lies."""
        place = self._physical[block]
        assert place >= 0, f"block {block} is free"
        return place

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert every invariant, given the block lists of all holders."""
        expected = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        assert expected == self._ref_count, "reference counts differ from the holders' blocks"
        held = {block for block, count in enumerate(expected) if count}
        assert sorted(self._free_logical) == sorted(set(range(self.num_blocks)) - held), "free logical blocks are wrong"
        places = [self._physical[block] for block in held] + self._free_physical
        assert sorted(places) == list(range(self.num_blocks)), "physical blocks are lost or doubled"


class PagedKVCache:
    """One output's KV: an ordered list of logical blocks. Owns one reference to each until `release`.

    ``physical_blocks`` mirrors the list in physical terms; it is what a block-table row is made of, and it is shared
    with readers: it grows, and copy-on-write may replace an entry, but blocks given back never show in a list that was
    handed out. ``version`` changes with every change of it, and no other list of the manager ever has the same one,
    but for 0, the empty list. Positions below ``writable_until`` can be written now, from where writing stands.
    """

    def __init__(self, manager: BlockManager, blocks: Iterable[int] = ()) -> None:
        """``blocks``: its first ones, full, with a reference each that is the cache's from here on."""
        self._manager = manager
        self.blocks: list[int] = list(blocks)
        self.physical_blocks: list[int] = [manager.physical(block) for block in self.blocks]
        self.version = manager.new_version() if self.blocks else 0
        self.writable_until = 0

    def blocks_missing(self, num_tokens: int, write_from: int) -> int:
        """New blocks needed to write tokens ``[write_from, num_tokens)``, a copy of a shared last block included."""
        missing = self._manager.blocks_for(num_tokens) - len(self.blocks)
        return max(missing, 0) + (self._shared_block_at(write_from) is not None)

    def prepare_write(self, num_tokens: int, write_from: int) -> list[tuple[int, int]]:
        """Make ``[write_from, num_tokens)`` writable by this cache alone. Writing never goes back.

        Returns the physical (source, destination) copies that must run before the write: a partly filled block
        that others still read is replaced by a copy. Raises `NoFreeBlocks`, and then nothing has changed.
        """
        new = self._manager.allocate(self.blocks_missing(num_tokens, write_from))
        if new:
            self.version = self._manager.new_version()
        copies = []
        if (index := self._shared_block_at(write_from)) is not None:
            copies.append((self.physical_blocks[index], self._manager.physical(new[0])))
            self._manager.release([self.blocks[index]])
            self._set(index, new.pop(0))
        for block in new:
            self.blocks.append(block)
            self.physical_blocks.append(self._manager.physical(block))
        self.writable_until = len(self.blocks) * self._manager.block_size
        return copies

    def fork(self) -> "PagedKVCache":
        """A second cache over the same blocks; whoever writes a shared block first gets a copy of it."""
        twin = PagedKVCache(self._manager)
        twin.blocks, twin.physical_blocks = list(self.blocks), list(self.physical_blocks)
        twin.version = self._manager.new_version()
        self.writable_until = 0
        self._manager.share(twin.blocks)
        return twin

    def release(self) -> None:
        """Give every block back; the cache is empty afterwards, with lists of its own."""
        blocks, self.blocks, self.physical_blocks = self.blocks, [], []
        self.version = self.writable_until = 0
        self._manager.release(blocks)

    def _shared_block_at(self, position: int) -> int | None:
        index = position // self._manager.block_size
        return index if index < len(self.blocks) and self._manager.is_shared(self.blocks[index]) else None

    def _set(self, index: int, block: int) -> None:
        self.blocks[index], self.physical_blocks[index] = block, self._manager.physical(block)
