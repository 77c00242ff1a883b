"""RadixTree: the index of reusable prefixes. Structure only: it counts locks, but owns no block. Pure Python, no torch.

Edges hold whole blocks and split at block boundaries only; a child is found by the bytes of its first block. Tokens
are bytes (four each), so comparing is a memory comparison and no Python runs per token. Results are token-granular all
the same: behind the last whole block, a match says how many tokens of one more block are equal.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as the tree's keys."""
    return array("i", token_ids).tobytes()


class Node:
    """An edge and what hangs on it: ``blocks`` hold the KV of the tokens in ``key``, behind those of all ancestors.

    A root has its root key instead, and no blocks.

    ``locks``: active holders in this node's subtree; 0 means that nobody holds its blocks. ``used`` is the tree's clock
    when it was last of use. ``heads`` find a child by its first few tokens, for matches within a block.
    """

    __slots__ = ("blocks", "children", "heads", "key", "locks", "parent", "used")

    def __init__(self, key: bytes, blocks: list[int], parent: "Node | None") -> None:
        self.key = key
        self.blocks = blocks
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.heads: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: whole ``blocks``, ending ``inside`` blocks into ``node``'s edge.

    ``partial``: a block whose first so many tokens are the next ones, or None. Valid until the tree changes.
    """

    node: Node
    inside: int
    blocks: list[int]
    partial: tuple[int, int] | None


class RadixTree:
    """One tree per root key; roots that differ share nothing.

    ``partial_tokens``: equal tokens within a block that make a partial match worth telling.
    """

    def __init__(self, block_size: int, partial_tokens: int) -> None:
        assert partial_tokens >= 1
        self.clock = 0
        self.num_nodes = 0
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._head_bytes = min(partial_tokens, block_size) * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}

    def match(self, root: bytes, tokens: bytes) -> Match | None:
        """The longest prefix of ``tokens`` that is known under ``root``; None without any. Changes nothing."""
        node = self._roots.get(root)
        if node is None:
            return None
        size, position, inside, blocks = self._block_bytes, 0, 0, []
        while True:
            child = node.children.get(tokens[position : position + size])
            if child is None:
                partial = self._partial_child(node, tokens, position)
                break
            node, inside = child, self._common_blocks(child.key, tokens, position)
            blocks += child.blocks if inside == len(child.blocks) else child.blocks[:inside]
            position += inside * size
            if inside < len(child.blocks):
                partial = self._partial_inside(child, inside, tokens, position)
                break
        return Match(node, inside, blocks, partial) if blocks or partial else None

    def hold(self, match: Match) -> tuple[Node, int]:
        """Lock what was matched: the node that ends there, and how many blocks are held that were not.

        The edge is split where the match ends, so that nothing behind it is held.
        """
        node = match.node
        if node.parent is not None and match.inside < len(node.blocks):
            node = self._split(node, match.inside)
        return node, self.lock(node)

    def insert(self, root: bytes, tokens: bytes, blocks: list[int]) -> tuple[Node, int]:
        """Make ``tokens`` (whole blocks) known. Returns the node that ends there and how many blocks were known.

        ``blocks`` behind that number are the tree's now, too; of the others the tree keeps those it has. The node is
        not locked.
        """
        assert len(tokens) == len(blocks) * self._block_bytes
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = Node(root, [], None)
        position, known = 0, 0
        while position < len(tokens):
            child = node.children.get(tokens[position : position + self._block_bytes])
            if child is None:
                return self._add(node, tokens[position:], blocks[known:]), known
            common = self._common_blocks(child.key, tokens, position)
            node = child if common == len(child.blocks) else self._split(child, common)
            position += common * self._block_bytes
            known += common
        return node, known

    def lock(self, node: Node) -> int:
        """One holder more for the node and all its ancestors. Returns how many blocks are held that were not."""
        newly = 0
        self.clock += 1
        at: Node | None = node
        while at is not None:
            if at.locks == 0:
                newly += len(at.blocks)
            at.locks += 1
            at.used = self.clock
            at = at.parent
        return newly

    def unlock(self, node: Node) -> int:
        """One holder less, up the parent chain. Returns how many blocks nobody holds any more."""
        freed = 0
        self.clock += 1
        root = node
        at: Node | None = node
        while at is not None:
            assert at.locks > 0, "unlocked more often than locked"
            at.locks -= 1
            at.used = self.clock
            if at.locks == 0:
                freed += len(at.blocks)
            root, at = at, at.parent
        self._drop_if_empty(root)
        return freed

    def remove(self, node: Node) -> Node | None:
        """Take a leaf that nobody holds out of the tree. Returns its parent when that is such a leaf now."""
        parent = node.parent
        assert parent is not None, "a root is no leaf"
        assert not node.children, "only a leaf can be removed"
        assert node.locks == 0, "a held node cannot be removed"
        del parent.children[node.key[: self._block_bytes]]
        head = node.key[: self._head_bytes]
        if parent.heads.get(head) is node:
            del parent.heads[head]
        node.parent = None
        self.num_nodes -= 1
        if parent.children or parent.locks:
            return None
        if parent.parent is not None:
            return parent
        self._drop_if_empty(parent)
        return None

    def forget(self) -> list[int]:
        """Nothing is known any more. Returns the blocks of all nodes, which are the tree's no longer.

        Nodes that are held are empty from here on: they can be locked and unlocked, and nothing hangs on that.
        """
        nodes = list(self.nodes())
        blocks = [block for node in nodes for block in node.blocks]
        for node in nodes:
            node.parent, node.blocks = None, []
            node.children.clear()
        self._roots.clear()
        self.num_nodes = 0
        return blocks

    def is_known(self, node: Node) -> bool:
        """Whether a node that is held still leads to something: false once it is forgotten."""
        return node.parent is not None or self._roots.get(node.key) is node

    def nodes(self) -> Iterator[Node]:
        """Every node, roots left out."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- parts --------------------------------------------------------------------------------------------------

    def _add(self, parent: Node, key: bytes, blocks: list[int]) -> Node:
        node = Node(key, list(blocks), parent)
        node.used = self.clock
        parent.children[key[: self._block_bytes]] = node
        parent.heads[key[: self._head_bytes]] = node
        self.num_nodes += 1
        return node

    def _drop_if_empty(self, root: Node) -> None:
        if not root.children and root.locks == 0 and self._roots.get(root.key) is root:
            del self._roots[root.key]

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut the edge behind so many blocks. ``node`` stays the lower part; the upper one, a new node, is returned."""
        parent, cut = node.parent, blocks * self._block_bytes
        assert parent is not None
        assert 0 < blocks < len(node.blocks)
        upper = Node(node.key[:cut], node.blocks[:blocks], parent)
        upper.locks, upper.used = node.locks, node.used
        parent.children[upper.key[: self._block_bytes]] = upper
        head = upper.key[: self._head_bytes]
        if parent.heads.get(head) is node:
            parent.heads[head] = upper
        node.key, node.blocks, node.parent = node.key[cut:], node.blocks[blocks:], upper
        upper.children[node.key[: self._block_bytes]] = node
        upper.heads[node.key[: self._head_bytes]] = node
        self.num_nodes += 1
        return upper

    def _common_blocks(self, key: bytes, tokens: bytes, position: int) -> int:
        """Whole blocks of ``key`` that stand at ``position`` of ``tokens``."""
        length = min(len(key), (len(tokens) - position) // self._block_bytes * self._block_bytes)
        return _common_bytes(key[:length], tokens[position : position + length]) // self._block_bytes

    def _partial_child(self, node: Node, tokens: bytes, position: int) -> tuple[int, int] | None:
        child = node.heads.get(tokens[position : position + self._head_bytes])
        return None if child is None else self._partial_inside(child, 0, tokens, position)

    def _partial_inside(self, node: Node, index: int, tokens: bytes, position: int) -> tuple[int, int] | None:
        start = index * self._block_bytes
        rest = tokens[position : position + self._block_bytes]
        common = _common_bytes(node.key[start : start + len(rest)], rest) // TOKEN_BYTES
        return (node.blocks[index], common) if common * TOKEN_BYTES >= self._head_bytes else None


def _common_bytes(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two strings of equal length."""
    if a == b:
        return len(a)
    differing = int.from_bytes(a, "big") ^ int.from_bytes(b, "big")
    return len(a) - (differing.bit_length() + 7) // 8
