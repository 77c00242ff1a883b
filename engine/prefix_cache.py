"""PrefixCache: the one place that knows both the tree of prefixes and the block manager. Pure Python, no torch.

Who counts what: a block's references are its holders (outputs' caches) and one more while it is in the tree; a node's
locks are the outputs whose held node lies in its subtree. A block that only the tree refers to is cached: it can be
had back by evicting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.eviction import EvictionPolicy, LeastRecentlyUsed, is_evictable
from engine.radix_tree import Node, RadixTree


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts since the start. ``lookups`` and ``hits`` are of admissions, tokens of prompts."""

    lookups: int = 0
    hits: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    copies: int = 0
    evicted_blocks: int = 0


class HeldPrefix:
    """One output's hold on the tree. To be moved by `PrefixCache.insert` and ended once by `PrefixCache.release`."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node: Node | None = node


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a lookup found, held: whole ``blocks`` with one reference each for the taker; ``partial`` as of a match."""

    held: HeldPrefix
    blocks: list[int]
    partial: tuple[int, int] | None


class PrefixCache:
    """Prefixes of finished and running outputs, by whole blocks.

    ``partial_tokens``: how many tokens of a partly equal block are worth a copy of it.
    """

    def __init__(self, manager: BlockManager, partial_tokens: int = 4, policy: EvictionPolicy | None = None) -> None:
        self.stats = PrefixCacheStats()
        self.num_cached_blocks = 0  # in the tree, and held by nobody
        self.num_flushes = 0
        self.num_changes = 0  # of what can be found
        self._manager = manager
        self._tree = RadixTree(manager.block_size, partial_tokens)
        self._policy = policy or LeastRecentlyUsed()
        self._size = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree, held or not."""
        return self._size

    @property
    def num_nodes(self) -> int:
        return self._tree.num_nodes

    def take(self, root: bytes, tokens: bytes) -> PrefixHit | None:
        """Look up a prefix and hold what is found, for an output that is being admitted."""
        match = self._tree.match(root, tokens)
        if match is None:
            return None
        node, newly_held = self._tree.hold(match)
        self.num_cached_blocks -= newly_held
        self._manager.share(match.blocks)
        return PrefixHit(HeldPrefix(node), match.blocks, match.partial)

    def give_back(self, hit: PrefixHit) -> None:
        """Undo `take`."""
        self._manager.release(hit.blocks)
        self.release(hit.held)

    def insert(self, held: HeldPrefix | None, root: bytes, tokens: bytes, blocks: Sequence[int]) -> HeldPrefix:
        """Make written and committed ``blocks`` known by their ``tokens``, and move the output's hold to their end.

        Nothing more becomes known of who holds what a flush forgot: others may have the same blocks, without a hold.
        """
        if held is not None and held.node is not None and not self._tree.is_known(held.node):
            return held
        node, known = self._tree.insert(root, tokens, list(blocks))
        new = list(blocks[known:])
        self.num_changes += bool(new)
        self._manager.share(new)
        self._size += len(new)
        self.num_cached_blocks += len(new)
        self.num_cached_blocks -= self._tree.lock(node)
        if held is None:
            return HeldPrefix(node)
        self._unlock(held.node)
        held.node = node
        return held

    def fork(self, held: HeldPrefix) -> HeldPrefix:
        """A hold of its own on the same prefix."""
        assert held.node is not None
        self.num_cached_blocks -= self._tree.lock(held.node)
        return HeldPrefix(held.node)

    def release(self, held: HeldPrefix) -> None:
        """End a hold. The output gives its own references back itself, before."""
        node, held.node = held.node, None
        assert node is not None, "a prefix is released twice"
        self._unlock(node)

    def discard(self, held: HeldPrefix) -> None:
        """End a hold, and forget what nobody else holds or has gone on from. For KV that is not to be trusted."""
        node, held.node = held.node, None
        self._unlock(node)
        while node is not None and is_evictable(node):
            node = self._remove(node)

    def evict(self, count: int) -> bool:
        """Free at least ``count`` blocks that are only cached, least valuable first. When there are fewer it is False,
        and none is freed."""
        if count > self.num_cached_blocks:
            return False
        while count > 0:
            leaf = self._policy.next()
            assert leaf is not None, "there are fewer cached blocks than counted"
            count -= len(leaf.blocks)
            self.stats.evicted_blocks += len(leaf.blocks)
            self._remove(leaf)
        return True

    def flush(self) -> int:
        """Forget everything. What is held stays with its holders and is freed when they leave. Returns blocks freed."""
        before = self._manager.num_free
        self.num_flushes += 1
        self.num_changes += 1
        self._manager.release(self._tree.forget())
        self._size = self.num_cached_blocks = 0
        return self._manager.num_free - before

    def check(self, held: Sequence[HeldPrefix]) -> list[int]:
        """Assert the tree's invariants, given all holds. Returns the blocks of all nodes, for the block manager's."""
        nodes = list(self._tree.nodes())
        blocks = [block for node in nodes for block in node.blocks]
        assert len(set(blocks)) == len(blocks), "a block is in the tree twice"
        assert len(nodes) == self._tree.num_nodes
        assert len(blocks) == self._size
        cached = [block for node in nodes if node.locks == 0 for block in node.blocks]
        assert self.num_cached_blocks == len(cached)
        assert not any(self._manager.is_shared(block) for block in cached), "a cached block is held by an output"
        locks = dict.fromkeys(nodes, 0)
        for hold in held:
            at = hold.node
            assert at is not None, "a released hold is still held"
            while at.parent is not None:
                locks[at] += 1
                at = at.parent
        assert all(node.locks == count for node, count in locks.items()), "locks differ from the holds"
        return blocks

    # -- parts --------------------------------------------------------------------------------------------------

    def _unlock(self, node: Node | None) -> None:
        assert node is not None
        self.num_cached_blocks += self._tree.unlock(node)
        self._policy.offer(node)

    def _remove(self, leaf: Node) -> Node | None:
        """Returns its parent when that can be removed next."""
        self.num_changes += 1
        parent = self._tree.remove(leaf)
        self._manager.release(leaf.blocks)
        self._size -= len(leaf.blocks)
        self.num_cached_blocks -= len(leaf.blocks)
        if parent is not None:
            self._policy.offer(parent)
        return parent
