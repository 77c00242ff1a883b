"""Stories and a property test of the block manager."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_manager import BlockManager, NoFreeBlocks, PagedKVCache


def test_a_pool_gives_each_block_once_and_takes_it_back() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    first, second = manager.allocate(3), manager.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert manager.num_free == 0
    with pytest.raises(NoFreeBlocks):
        manager.allocate(1)
    manager.release(first)
    assert manager.num_free == 3
    manager.check([second])


def test_a_failed_allocation_takes_nothing() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    held = manager.allocate(2)
    with pytest.raises(NoFreeBlocks):
        manager.allocate(3)
    manager.check([held])


def test_the_last_holder_frees_a_shared_block() -> None:
    manager = BlockManager(num_blocks=2, block_size=16)
    blocks = manager.allocate(1)
    manager.share(blocks)
    manager.release(blocks)
    assert manager.num_free == 1
    manager.release(blocks)
    assert manager.num_free == 2


def test_releasing_or_sharing_a_free_block_is_a_broken_invariant() -> None:
    manager = BlockManager(num_blocks=2, block_size=16)
    blocks = manager.allocate(1)
    manager.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        manager.release(blocks)
    with pytest.raises(AssertionError, match="free"):
        manager.share(blocks)


def test_check_notices_a_lost_block_and_a_wrong_count() -> None:
    manager = BlockManager(num_blocks=2, block_size=16)
    blocks = manager.allocate(1)
    with pytest.raises(AssertionError):
        manager.check([])
    with pytest.raises(AssertionError):
        manager.check([blocks, blocks])


def test_a_cache_grows_by_whole_blocks() -> None:
    manager = BlockManager(num_blocks=4, block_size=16)
    cache = PagedKVCache(manager)
    assert cache.prepare_write(17, 0) == []
    assert len(cache.blocks) == 2
    assert cache.blocks_missing(32, 17) == 0
    assert cache.blocks_missing(33, 32) == 1
    cache.release()
    assert manager.num_free == 4


def test_forks_share_full_blocks_and_copy_the_partial_one_once_per_extra_writer() -> None:
    """Three outputs of a 20-token prompt: two copies of its second block, none of the first."""
    manager = BlockManager(num_blocks=8, block_size=16)
    parent = PagedKVCache(manager)
    parent.prepare_write(20, 0)
    caches = [parent, parent.fork(), parent.fork()]
    partial = parent.physical_blocks[1]
    copies = [cache.prepare_write(21, 20) for cache in caches]
    assert [len(c) for c in copies] == [1, 1, 0]
    assert [source for c in copies for source, _ in c] == [partial, partial]
    assert len({cache.physical_blocks[1] for cache in caches}) == 3
    assert len({cache.physical_blocks[0] for cache in caches}) == 1
    assert caches[2].physical_blocks[1] == partial
    manager.check([cache.blocks for cache in caches])


def test_forks_of_a_prompt_that_fills_its_blocks_copy_nothing() -> None:
    manager = BlockManager(num_blocks=8, block_size=16)
    parent = PagedKVCache(manager)
    parent.prepare_write(32, 0)
    twin = parent.fork()
    assert parent.prepare_write(33, 32) == []
    assert twin.prepare_write(33, 32) == []
    assert parent.blocks[:2] == twin.blocks[:2]
    assert parent.blocks[2] != twin.blocks[2]


def test_a_write_that_finds_no_block_changes_nothing() -> None:
    manager = BlockManager(num_blocks=2, block_size=16)
    parent = PagedKVCache(manager)
    parent.prepare_write(20, 0)
    twin = parent.fork()
    before = list(twin.blocks)
    with pytest.raises(NoFreeBlocks):
        twin.prepare_write(21, 20)
    assert twin.blocks == before
    manager.check([parent.blocks, twin.blocks])


def test_the_version_tells_every_change_of_the_list_and_nothing_else() -> None:
    manager = BlockManager(num_blocks=8, block_size=16)
    cache = PagedKVCache(manager)
    cache.prepare_write(17, 0)
    blocks, version = cache.physical_blocks, cache.version
    cache.prepare_write(32, 17)
    assert cache.version == version, "no block was added"
    twin = cache.fork()
    assert (cache.physical_blocks, cache.version) == (blocks, version)
    assert twin.version not in (0, version)
    cache.prepare_write(33, 32)
    assert cache.version > version
    assert cache.physical_blocks is blocks
    version = cache.version
    twin.prepare_write(32, 31)
    assert cache.version == version, "the twin's copy on write is none of its business"


def test_copy_on_write_changes_the_version() -> None:
    manager = BlockManager(num_blocks=8, block_size=16)
    cache = PagedKVCache(manager)
    cache.prepare_write(20, 0)
    twin = cache.fork()
    version, blocks = cache.version, list(cache.physical_blocks)
    assert cache.prepare_write(21, 20)
    assert cache.version > version
    assert cache.physical_blocks != blocks
    assert twin.physical_blocks == blocks


def test_a_released_list_stays_as_it_was_and_its_version_never_comes_back() -> None:
    manager = BlockManager(num_blocks=2, block_size=16)
    cache = PagedKVCache(manager)
    cache.prepare_write(32, 0)
    handed_out, content, version = cache.physical_blocks, list(cache.physical_blocks), cache.version
    cache.release()
    assert (cache.physical_blocks, cache.version) == ([], 0)
    cache.prepare_write(32, 0)
    assert handed_out == content
    assert cache.physical_blocks is not handed_out
    assert cache.version > version


class PoolMachine(RuleBasedStateMachine):
    """Random growth, forks and releases; every write must be private and every invariant hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=12, block_size=4)
        self.caches: list[tuple[PagedKVCache, int]] = []
        self.seen: dict[int, list[int]] = {}

    @rule(tokens=st.integers(1, 20))
    def start(self, tokens: int) -> None:
        cache = PagedKVCache(self.manager)
        if cache.blocks_missing(tokens, 0) <= self.manager.num_free:
            assert cache.prepare_write(tokens, 0) == []
            self.caches.append((cache, tokens))

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), more=st.integers(1, 6))
    def grow(self, data: st.DataObject, more: int) -> None:
        index = data.draw(st.integers(0, len(self.caches) - 1))
        cache, tokens = self.caches[index]
        missing = cache.blocks_missing(tokens + more, tokens)
        if missing > self.manager.num_free:
            with pytest.raises(NoFreeBlocks):
                cache.prepare_write(tokens + more, tokens)
            return
        free = self.manager.num_free
        copies = cache.prepare_write(tokens + more, tokens)
        assert self.manager.num_free == free - missing
        assert len(copies) <= 1
        written = cache.blocks[tokens // 4 :]
        others = [block for other, _ in self.caches if other is not cache for block in other.blocks]
        assert not set(written) & set(others), "a written block is read by another"
        self.caches[index] = (cache, tokens + more)

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, tokens = data.draw(st.sampled_from(self.caches))
        self.caches.append((cache.fork(), tokens))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        cache, _ = self.caches.pop(data.draw(st.integers(0, len(self.caches) - 1)))
        cache.release()

    @invariant()
    def everything_adds_up(self) -> None:
        self.manager.check([cache.blocks for cache, _ in self.caches])
        for cache, _ in self.caches:
            assert cache.physical_blocks == [self.manager.physical(block) for block in cache.blocks]

    @invariant()
    def a_version_stands_for_one_list(self) -> None:
        for cache, _ in self.caches:
            assert self.seen.setdefault(cache.version, list(cache.physical_blocks)) == cache.physical_blocks
        assert len({cache.version for cache, _ in self.caches}) == len(self.caches)

    @invariant()
    def what_is_writable_is_private(self) -> None:
        for cache, tokens in self.caches:
            assert cache.writable_until <= 4 * len(cache.blocks)
            if tokens < cache.writable_until:
                assert cache.blocks_missing(cache.writable_until, tokens) == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
