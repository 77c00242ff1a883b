"""Random operations on the prefix cache against a dict.

Tokens are few and blocks small, so that prefixes meet, part and meet again; the pool is small, so that blocks go.
"""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_manager import BlockManager, PagedKVCache
from engine.prefix_cache import HeldPrefix, PrefixCache
from engine.radix_tree import TOKEN_BYTES, token_bytes

NUM_BLOCKS = 12
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)

Prefix = tuple[int, ...]


class Known:
    """What must be known: the block of every prefix of whole blocks, first come, first kept. Nothing but dicts."""

    def __init__(self, size: int, partial_tokens: int) -> None:
        self.size = size
        self.head = min(partial_tokens, size)
        self.blocks: dict[tuple[bytes, Prefix], int] = {}
        self._newest: dict[tuple[bytes, Prefix, Prefix], Prefix] = {}

    def match(self, root: bytes, tokens: list[int]) -> tuple[list[int], tuple[int, int] | None]:
        """The blocks of the longest known prefix; of those one block longer that begin alike, the newest in part."""
        found: list[int] = []
        end = self.size
        while (block := self.blocks.get((root, tuple(tokens[:end])))) is not None and end <= len(tokens):
            found.append(block)
            end += self.size
        prefix, rest = tuple(tokens[: end - self.size]), tuple(tokens[end - self.size : end])
        newest = self._newest.get((root, prefix, rest[: self.head]))
        if newest is None:
            return found, None
        equal = next((i for i, (a, b) in enumerate(zip(newest, rest, strict=False)) if a != b), len(rest))
        return found, (self.blocks[root, prefix + newest], equal)

    def insert(self, root: bytes, tokens: list[int], blocks: list[int]) -> None:
        for number, block in enumerate(blocks):
            start, end = number * self.size, (number + 1) * self.size
            if (root, tuple(tokens[:end])) not in self.blocks:
                self.blocks[root, tuple(tokens[:end])] = block
                self._newest[root, tuple(tokens[:start]), tuple(tokens[start:][: self.head])] = tuple(tokens[start:end])

    def keep(self, blocks: set[int]) -> list[int]:
        """Only these are known any more. Returns the others, after a check that no prefix has lost its beginning."""
        gone = [key for key, block in self.blocks.items() if block not in blocks]
        freed = [self.blocks.pop(key) for key in gone]
        for root, prefix in gone:
            before, last = prefix[: -self.size], prefix[-self.size :]
            if self._newest.get((root, before, last[: self.head])) == last:
                del self._newest[root, before, last[: self.head]]
        for root, prefix in self.blocks:
            assert len(prefix) == self.size or (root, prefix[: -self.size]) in self.blocks
        return freed


@dataclass(eq=False)
class Holder:
    """Someone who computes: ``written`` of its ``tokens``, of which it holds ``known`` whole blocks in the cache.

    ``is_cut_off``: a flush forgot what it held.
    """

    root: bytes
    tokens: list[int]
    kv: PagedKVCache
    held: HeldPrefix | None
    written: int
    known: int = 0
    is_cut_off: bool = False

    def holds(self, size: int) -> set[tuple[bytes, Prefix]]:
        """The prefixes that are locked for it."""
        count = 0 if self.is_cut_off else self.known
        return {(self.root, tuple(self.tokens[: (i + 1) * size])) for i in range(count)}


class PrefixMachine(RuleBasedStateMachine):
    """Holders come, write, insert, fork and leave in any order, beside evictions and flushes.

    ``content``: what stands in each physical block, as the prefix that ends at each of its positions.
    """

    @initialize(size=st.integers(2, 4), partial_tokens=st.integers(1, 3))
    def make(self, size: int, partial_tokens: int) -> None:
        self.size = size
        self.manager = BlockManager(NUM_BLOCKS, size)
        self.cache = PrefixCache(self.manager, partial_tokens)
        self.model = Known(size, partial_tokens)
        self.holders: list[Holder] = []
        self.content: list[list[tuple[bytes, Prefix] | None]] = [[None] * size for _ in range(NUM_BLOCKS)]

    # -- rules --------------------------------------------------------------------------------------------------

    @rule(data=st.data(), share=st.sampled_from([0, 1, 2, 4, 4, 4]))
    def start(self, data: st.DataObject, share: int) -> None:
        """Most compute all of their prompt and make it known at once."""
        holder = self._admit(*self._draw(data))
        if holder is not None and share:
            self._write(holder, share * len(holder.tokens) // 4)
            self._insert(holder, holder.written // self.size)

    @rule(data=st.data(), share=st.integers(2, 4))
    def pass_by(self, data: st.DataObject, share: int) -> None:
        """Come, compute, and leave what was computed in the cache."""
        holder = self._admit(*self._draw(data))
        if holder is not None:
            self._write(holder, share * len(holder.tokens) // 4)
            self._leave(holder, "insert")

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        root, tokens = self._draw(data)
        hit = self.cache.take(root, token_bytes(tokens))
        found = (hit.blocks, hit.partial) if hit is not None else ([], None)
        assert found == self.model.match(root, tokens)
        if hit is not None:
            self._check([*self._holds(), hit.held], [*self._tables(), hit.blocks])
            self.cache.give_back(hit)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 14))
    def write(self, data: st.DataObject, count: int) -> None:
        self._write(data.draw(st.sampled_from(self.holders)), count)

    def _write(self, holder: Holder, count: int) -> None:
        for position in range(holder.written, min(holder.written + count, len(holder.tokens))):
            index, offset = divmod(position, self.size)
            block = holder.kv.blocks[index]
            assert block not in self.model.blocks.values(), "a known block is written"
            assert not self.manager.is_shared(block), "a shared block is written"
            prefix = holder.root, tuple(holder.tokens[: position + 1])
            self.content[self.manager.physical(block)][offset] = prefix
            holder.written += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        length = len(holder.tokens)
        if holder.written < length or not self._make_room(holder.kv.blocks_missing(length + 1, length)):
            return
        for source, destination in holder.kv.prepare_write(length + 1, length):
            self.content[destination] = list(self.content[source])
        holder.tokens.append(token)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self._insert(holder, holder.written // self.size)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.written == len(holder.tokens):
            held = self.cache.fork(holder.held) if holder.held is not None else None
            kv = holder.kv.fork()
            twin = Holder(holder.root, list(holder.tokens), kv, held, holder.written, holder.known, holder.is_cut_off)
            self.holders.append(twin)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), end=st.sampled_from(["insert", "insert", "insert", "release", "discard"]))
    def leave(self, data: st.DataObject, end: str) -> None:
        self._leave(data.draw(st.sampled_from(self.holders)), end)

    def _leave(self, holder: Holder, end: str) -> None:
        if end == "insert":
            self._insert(holder, holder.written // self.size)
        self.holders.remove(holder)
        holder.kv.release()
        if holder.held is not None and end == "discard":
            expected = self._known_to(holder)
            self.cache.discard(holder.held)
            assert set(self._follow()) == expected
        elif holder.held is not None:
            self.cache.release(holder.held)

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        cached, free = self.cache.num_cached_blocks, self.manager.num_free
        assert self.cache.evict(count) == (count <= cached)
        freed = self._follow()
        assert len(freed) == self.manager.num_free - free
        assert len(freed) >= count if count <= cached else not freed

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def flush(self, really: bool) -> None:
        if not really:
            return
        free = self.manager.num_free
        assert self.cache.flush() == self.manager.num_free - free
        assert not self.cache.check(self._holds())
        self._follow()
        for holder in self.holders:
            holder.is_cut_off = holder.held is not None

    # -- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "model"):
            self._check(self._holds(), self._tables())

    @invariant()
    def what_nobody_holds_can_be_evicted(self) -> None:
        if hasattr(self, "model"):
            held = set().union(*(holder.holds(self.size) for holder in self.holders))
            assert held <= self.model.blocks.keys()
            assert self.cache.num_cached_blocks == len(self.model.blocks) - len(held)

    @invariant()
    def every_block_holds_what_its_readers_expect(self) -> None:
        if not hasattr(self, "model"):
            return
        for (root, prefix), block in self.model.blocks.items():
            ends = range(len(prefix) - self.size + 1, len(prefix) + 1)
            assert self.content[self.manager.physical(block)] == [(root, prefix[:end]) for end in ends]
        for holder in self.holders:
            read = [prefix for block in holder.kv.physical_blocks for prefix in self.content[block]]
            ends = range(1, holder.written + 1)
            assert read[: holder.written] == [(holder.root, tuple(holder.tokens[:end])) for end in ends]

    # -- parts --------------------------------------------------------------------------------------------------

    def _draw(self, data: st.DataObject) -> tuple[bytes, list[int]]:
        """A prompt, mostly one that begins like what is known or being computed."""
        heads: list[tuple[bytes, Prefix]] = [(b"", ()), (b"a", ())]
        heads += [*self.model.blocks, *((holder.root, tuple(holder.tokens)) for holder in self.holders)]
        root, head = data.draw(st.sampled_from(heads))
        at = data.draw(st.integers(0, len(head)))
        return root, [*head[: len(head) - at], *data.draw(PROMPTS)][:14]

    def _admit(self, root: bytes, tokens: list[int]) -> Holder | None:
        expected = self.model.match(root, tokens[:-1])
        hit = self.cache.take(root, token_bytes(tokens)[:-TOKEN_BYTES])
        blocks, partial = (hit.blocks, hit.partial) if hit is not None else ([], None)
        assert (blocks, partial) == expected
        source = self.manager.physical(partial[0]) if partial is not None else -1
        if not self._make_room(self.manager.blocks_for(len(tokens)) - len(blocks)):
            if hit is not None:
                self.cache.give_back(hit)
            return None
        kv = PagedKVCache(self.manager, blocks)
        written = len(blocks) * self.size
        assert kv.prepare_write(len(tokens), written) == []
        if partial is not None:
            self.content[kv.physical_blocks[len(blocks)]] = list(self.content[source])
            written += partial[1]
        assert written < len(tokens)
        held = hit.held if hit is not None else None
        self.holders.append(Holder(root, list(tokens), kv, held, written, len(blocks)))
        return self.holders[-1]

    def _insert(self, holder: Holder, whole: int) -> None:
        """Of a holder, and of all that have the same blocks by a fork."""
        for other in [holder, *(other for other in self.holders if other is not holder)]:
            pairs = zip(holder.kv.blocks[:whole], other.kv.blocks, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(whole, len(other.kv.blocks)))
            if same > other.known:
                if not other.is_cut_off:
                    self.model.insert(other.root, other.tokens, other.kv.blocks[:same])
                key = token_bytes(other.tokens[: same * self.size])
                other.held = self.cache.insert(other.held, other.root, key, other.kv.blocks[:same])
                other.known = same

    def _known_to(self, holder: Holder) -> set[int]:
        """Blocks at the end of what a holder, who has left, held, that nobody else holds or has gone on from."""
        needed = set().union(*(other.holds(self.size) for other in self.holders))
        found: set[int] = set()
        for root, prefix in sorted(holder.holds(self.size), reverse=True):
            longer = sum(key[0] == root and key[1][: len(prefix)] == prefix for key in self.model.blocks) - 1
            if (root, prefix) in needed or longer > len(found):
                break
            found.add(self.model.blocks[root, prefix])
        return found

    def _make_room(self, count: int) -> bool:
        missing = count - self.manager.num_free
        if missing > self.cache.num_cached_blocks:
            return False
        assert self.cache.evict(max(missing, 0))
        self._follow()
        assert self.manager.num_free >= count
        return True

    def _follow(self) -> list[int]:
        """The model forgets what the cache has; no holder may have had it, unless everything is gone."""
        known = {block for node in self.cache._tree.nodes() for block in node.blocks}
        freed = self.model.keep(known)
        assert not known or not {block for table in self._tables() for block in table} & set(freed)
        return freed

    def _holds(self) -> list[HeldPrefix]:
        return [holder.held for holder in self.holders if holder.held is not None]

    def _tables(self) -> list[list[int]]:
        return [holder.kv.blocks for holder in self.holders]

    def _check(self, holds: list[HeldPrefix], tables: list[list[int]]) -> None:
        in_tree = self.cache.check(holds)
        assert sorted(in_tree) == sorted(self.model.blocks.values())
        self.manager.check([in_tree, *tables])
        held = {block for table in tables for block in table}
        own, locked = len(held - set(in_tree)), self.cache.num_blocks - self.cache.num_cached_blocks
        assert self.manager.num_free + self.cache.num_cached_blocks + locked + own == NUM_BLOCKS


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


class LongPrefixMachine(PrefixMachine):
    pass


TestLongPrefixMachine = pytest.mark.slow(LongPrefixMachine.TestCase)
LongPrefixMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)
