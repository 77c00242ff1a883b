"""Stories of the tree of prefixes, with exact results. Pure Python: no model, no block manager."""

import random

import pytest

from engine.radix_tree import Match, Node, RadixTree, token_bytes

R = b"root"
SIZES = [1, 4, 16]


def tree_of(block_size: int, partial_tokens: int = 1) -> RadixTree:
    return RadixTree(block_size, partial_tokens)


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def insert(tree: RadixTree, tokens: list[int], blocks: list[int], root: bytes = R) -> tuple[Node, int]:
    return tree.insert(root, token_bytes(tokens), blocks)


def match(tree: RadixTree, tokens: list[int], root: bytes = R) -> Match | None:
    return tree.match(root, token_bytes(tokens))


def found(tree: RadixTree, tokens: list[int], root: bytes = R) -> tuple[list[int], tuple[int, int] | None]:
    """Whole blocks and the partial one."""
    result = match(tree, tokens, root)
    return (result.blocks, result.partial) if result is not None else ([], None)


def hold(tree: RadixTree, tokens: list[int]) -> tuple[Node, int]:
    result = match(tree, tokens)
    assert result is not None
    return tree.hold(result)


def shape(tree: RadixTree) -> list[tuple[list[int], int]]:
    """Blocks and locks of every node, by first block."""
    return sorted((list(node.blocks), node.locks) for node in tree.nodes())


# -- match ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_tree_knows_nothing(size: int) -> None:
    tree = tree_of(size)
    assert match(tree, []) is None
    assert match(tree, [1]) is None
    assert match(tree, numbers(0, 5 * size)) is None
    assert list(tree.nodes()) == []


@pytest.mark.parametrize("size", SIZES)
def test_every_length_of_a_known_prompt_matches_its_whole_blocks_and_the_rest_in_part(size: int) -> None:
    tree = tree_of(size)
    tokens = numbers(100, 4 * size)
    insert(tree, tokens, [7, 5, 3, 9])
    for length in range(4 * size + 1):
        whole, rest = divmod(length, size)
        partial = ([7, 5, 3, 9][whole], rest) if rest else None
        assert found(tree, tokens[:length]) == ([7, 5, 3, 9][:whole], partial), length
        assert found(tree, [*tokens[:length], 1, 2, 3]) == ([7, 5, 3, 9][:whole], partial), length
    assert found(tree, [*tokens, *numbers(0, 3 * size)]) == ([7, 5, 3, 9], None)
    assert shape(tree) == [([7, 5, 3, 9], 0)], "matching changes nothing"


@pytest.mark.parametrize("size", SIZES)
def test_a_prompt_that_differs_in_its_first_token_matches_nothing(size: int) -> None:
    tree = tree_of(size)
    insert(tree, numbers(100, 4 * size), [0, 1, 2, 3])
    assert match(tree, [99, *numbers(101, 4 * size - 1)]) is None
    assert match(tree, numbers(101, size)) is None


def test_a_144_token_prompt_and_one_that_differs_at_token_126() -> None:
    tree = tree_of(16, partial_tokens=4)
    tokens = numbers(1000, 144)
    insert(tree, tokens, numbers(0, 9))
    assert found(tree, [*tokens[:126], *numbers(0, 18)]) == (numbers(0, 7), (7, 14))


@pytest.mark.parametrize("at", range(17))
def test_equal_tokens_within_a_block_count_from_the_given_number_on(at: int) -> None:
    tree = tree_of(16, partial_tokens=4)
    tokens = numbers(1000, 32)
    insert(tree, tokens[:16], [0])
    insert(tree, tokens, [0, 1])
    for known in (tokens[:16], []):
        rest = tokens[len(known) : len(known) + 16]
        query = [*known, *rest[:at], *[5] * (16 - at)]
        block = len(known) // 16
        expected = numbers(0, block + (at == 16)), (block, at) if 4 <= at < 16 else None
        if at == 16 and not known:
            expected = [0], None
        assert found(tree, query) == expected


def test_of_alike_children_the_newest_is_compared() -> None:
    tree = tree_of(4, partial_tokens=2)
    insert(tree, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1])
    insert(tree, [1, 2, 3, 4, 5, 6, 9, 9], [0, 2])
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 1]) == ([0], (2, 2))
    newest, _ = insert(tree, [1, 2, 3, 4, 8, 8, 8, 8], [0, 3])
    assert found(tree, [1, 2, 3, 4, 5, 6, 7, 1]) == ([0], (2, 2)), "it begins differently"
    assert found(tree, [1, 2, 3, 4, 8, 8, 8, 1]) == ([0], (3, 3))
    tree.remove(newest)
    assert found(tree, [1, 2, 3, 4, 8, 8, 8, 1]) == ([0], None)


@pytest.mark.parametrize("size", SIZES)
def test_large_token_ids_are_told_apart(size: int) -> None:
    tree = tree_of(size)
    top = 2**31 - 1
    insert(tree, [top] * size, [1])
    insert(tree, [top - 1] * size, [2])
    insert(tree, [top - 256] * size, [3])
    insert(tree, [0] * size, [4])
    assert [found(tree, [token] * size)[0] for token in (top, top - 1, top - 256, 0)] == [[1], [2], [3], [4]]
    assert found(tree, [top - 65536] * size) == ([], None)
    with pytest.raises(OverflowError):
        token_bytes([2**31])


def test_tokens_are_compared_whole_and_not_by_their_bytes() -> None:
    """At 0x01020304 and 0x01020305 the bytes differ in the first or the last place, by the machine's order."""
    tree = tree_of(4)
    insert(tree, [0x01020304, 0x05060708, 7, 8], [0])
    assert found(tree, [0x01020304, 0x05060709, 7, 8]) == ([], (0, 1))
    assert found(tree, [0x01020304, 0x06060708, 7, 8]) == ([], (0, 1))
    assert found(tree, [0x01020305, 0x05060708, 7, 8]) == ([], None)
    assert found(tree, [0x02020304, 0x05060708, 7, 8]) == ([], None)


def test_blocks_that_are_equal_at_another_place_do_not_match() -> None:
    tree = tree_of(4)
    insert(tree, [1, 1, 1, 1, 2, 2, 2, 2], [0, 1])
    assert match(tree, [2, 2, 2, 2]) is None
    assert found(tree, [1, 1, 1, 1, 1, 1, 1, 1]) == ([0], None)
    insert(tree, [1] * 12, [0, 2, 3])
    assert found(tree, [1] * 11) == ([0, 2], (3, 3))


@pytest.mark.parametrize("size", SIZES)
def test_roots_share_nothing(size: int) -> None:
    tree = tree_of(size)
    tokens = numbers(0, 2 * size)
    insert(tree, tokens, [0, 1], b"a")
    assert found(tree, tokens, b"b") == ([], None)
    assert found(tree, tokens, b"") == ([], None)
    assert insert(tree, tokens, [2, 3], b"b")[1] == 0
    assert found(tree, tokens, b"a") == ([0, 1], None)
    assert found(tree, tokens, b"b") == ([2, 3], None)


# -- insert ---------------------------------------------------------------------------------------------------------


def test_inserting_no_block_is_the_root_and_nothing_known() -> None:
    tree = tree_of(4)
    node, known = insert(tree, [], [])
    assert (node.parent, known) == (None, 0)
    assert match(tree, [1, 2, 3, 4]) is None


def test_tokens_must_fill_the_blocks() -> None:
    tree = tree_of(4)
    with pytest.raises(AssertionError):
        insert(tree, [1, 2, 3], [0])
    with pytest.raises(AssertionError):
        insert(tree, [1, 2, 3, 4], [0, 1])


@pytest.mark.parametrize("size", SIZES)
def test_a_duplicate_changes_nothing_and_keeps_the_first_blocks(size: int) -> None:
    tree = tree_of(size)
    tokens = numbers(0, 3 * size)
    first, known = insert(tree, tokens, [0, 1, 2])
    assert known == 0
    assert insert(tree, tokens, [3, 4, 5]) == (first, 3)
    assert found(tree, tokens) == ([0, 1, 2], None)
    assert tree.num_nodes == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_longer_one_adds_only_what_is_new(size: int) -> None:
    tree = tree_of(size)
    tokens = numbers(0, 4 * size)
    parent, _ = insert(tree, tokens[: 2 * size], [0, 1])
    child, known = insert(tree, tokens, [5, 6, 7, 8])
    assert known == 2
    assert (child.parent, child.blocks) == (parent, [7, 8])
    assert found(tree, tokens) == ([0, 1, 7, 8], None)


@pytest.mark.parametrize("size", SIZES)
def test_a_shorter_one_ends_in_the_middle_of_an_edge(size: int) -> None:
    tree = tree_of(size)
    tokens = numbers(0, 4 * size)
    whole, _ = insert(tree, tokens, [0, 1, 2, 3])
    node, known = insert(tree, tokens[:size], [9])
    assert known == 1
    assert (node.blocks, whole.blocks, whole.parent) == ([0], [1, 2, 3], node)
    assert found(tree, tokens) == ([0, 1, 2, 3], None)


def test_one_that_turns_off_within_an_edge_splits_it_at_the_block() -> None:
    tree = tree_of(4)
    insert(tree, numbers(0, 16), [0, 1, 2, 3])
    node, known = insert(tree, [*numbers(0, 10), 99, 99], [4, 5, 6])
    assert known == 2, "the third block differs in its third token"
    assert node.blocks == [6]
    assert shape(tree) == [([0, 1], 0), ([2, 3], 0), ([6], 0)]
    assert found(tree, numbers(0, 16)) == ([0, 1, 2, 3], None)
    assert found(tree, [*numbers(0, 10), 99, 99]) == ([0, 1, 6], None)
    assert found(tree, [*numbers(0, 10), 99, 98]) == ([0, 1], (6, 3))


def test_the_callers_list_is_not_kept() -> None:
    tree = tree_of(4)
    blocks = [0, 1]
    node, _ = insert(tree, numbers(0, 8), blocks)
    blocks[0] = 9
    found(tree, numbers(0, 8))[0].append(7)
    assert node.blocks == [0, 1]


# -- locks ----------------------------------------------------------------------------------------------------------


def test_holding_splits_the_edge_where_the_match_ends() -> None:
    tree = tree_of(4)
    leaf, _ = insert(tree, numbers(0, 16), [0, 1, 2, 3])
    node, newly_held = hold(tree, numbers(0, 11))
    assert (node.blocks, newly_held) == ([0, 1], 2)
    assert leaf.parent is node
    assert shape(tree) == [([0, 1], 1), ([2, 3], 0)]
    assert hold(tree, numbers(0, 11)) == (node, 0)
    assert tree.unlock(node) == 0
    assert tree.unlock(node) == 2


def test_a_split_copies_the_locks_of_those_below() -> None:
    tree = tree_of(4)
    insert(tree, numbers(0, 36), numbers(0, 9))
    deep, held = hold(tree, numbers(0, 28))
    assert held == 7
    shallow, held = hold(tree, numbers(0, 12))
    assert held == 0
    assert shape(tree) == [([0, 1, 2], 2), ([3, 4, 5, 6], 1), ([7, 8], 0)]
    assert deep.blocks == [3, 4, 5, 6], "who holds the lower part keeps its node"
    insert(tree, [*numbers(0, 20), 99, 99, 99, 99], [0, 1, 2, 3, 4, 50])
    assert shape(tree) == [([0, 1, 2], 2), ([3, 4], 1), ([5, 6], 1), ([7, 8], 0), ([50], 0)]
    assert tree.unlock(shallow) == 0
    assert tree.unlock(deep) == 7
    assert [locks for _, locks in shape(tree)] == [0] * 5


@pytest.mark.parametrize("first", ["long", "short"])
def test_112_of_144_held_then_split_by_another_then_released_in_both_orders(first: str) -> None:
    tree = tree_of(16)
    tokens = numbers(0, 144)
    insert(tree, tokens, numbers(0, 9))
    nodes = {"long": hold(tree, tokens[:112])[0], "short": hold(tree, [*tokens[:50], 9, 9])[0]}
    assert shape(tree) == [([0, 1, 2], 2), ([3, 4, 5, 6], 1), ([7, 8], 0)]
    freed = [tree.unlock(nodes.pop(first)), tree.unlock(nodes.popitem()[1])]
    assert freed == ([4, 3] if first == "long" else [0, 7])
    assert all(locks == 0 for _, locks in shape(tree))


def test_unlocking_more_often_than_locking_is_a_broken_invariant() -> None:
    tree = tree_of(4)
    node, _ = insert(tree, numbers(0, 8), [0, 1])
    tree.lock(node)
    tree.unlock(node)
    with pytest.raises(AssertionError, match="more often"):
        tree.unlock(node)


def test_a_match_of_nothing_but_a_partial_block_holds_the_root() -> None:
    tree = tree_of(4)
    leaf, _ = insert(tree, numbers(0, 8), [0, 1])
    node, newly_held = hold(tree, [0, 1, 9])
    assert (node.parent, newly_held) == (None, 0)
    assert tree.remove(leaf) is None, "a root is not offered"
    again, known = insert(tree, numbers(0, 8), [2, 3])
    assert (again.parent, known) == (node, 0), "the held root lives on"
    assert tree.unlock(node) == 0
    assert found(tree, numbers(0, 8)) == ([2, 3], None)


# -- remove and forget ----------------------------------------------------------------------------------------------


def test_leaves_go_one_by_one_and_the_root_with_the_last() -> None:
    tree = tree_of(4)
    insert(tree, numbers(0, 16), [0, 1, 2, 3])
    fork, _ = insert(tree, [*numbers(0, 8), 9, 9, 9, 9], [0, 1, 4])
    parent = fork.parent
    assert parent is not None
    rest = next(node for node in tree.nodes() if node.blocks == [2, 3])
    assert tree.remove(rest) is None, "its parent has another child"
    assert found(tree, numbers(0, 16)) == ([0, 1], None)
    assert tree.remove(fork) is parent
    assert tree.remove(parent) is None
    assert (tree.num_nodes, list(tree.nodes()), tree._roots) == (0, [], {})


def test_a_parent_that_is_held_is_not_offered() -> None:
    tree = tree_of(4)
    insert(tree, numbers(0, 16), [0, 1, 2, 3])
    held, _ = hold(tree, numbers(0, 8))
    (leaf,) = (node for node in tree.nodes() if not node.children)
    assert tree.remove(leaf) is None
    tree.unlock(held)
    assert tree.remove(held) is None
    assert tree._roots == {}


def test_what_is_held_or_has_children_cannot_be_removed() -> None:
    tree = tree_of(4)
    leaf, _ = insert(tree, numbers(0, 16), [0, 1, 2, 3])
    parent, _ = hold(tree, numbers(0, 8))
    with pytest.raises(AssertionError, match="leaf"):
        tree.remove(parent)
    tree.lock(leaf)
    with pytest.raises(AssertionError, match="held"):
        tree.remove(leaf)


def test_an_empty_root_goes_when_its_last_holder_does() -> None:
    tree = tree_of(4)
    leaf, _ = insert(tree, numbers(0, 4), [0])
    root, _ = hold(tree, [0, 1])
    tree.remove(leaf)
    assert list(tree._roots) == [R]
    tree.unlock(root)
    assert tree._roots == {}


def test_what_is_forgotten_is_not_found_and_its_holders_leave_in_peace() -> None:
    tree = tree_of(4)
    tokens = numbers(0, 16)
    insert(tree, tokens, [0, 1, 2, 3])
    insert(tree, tokens, [4, 5, 6, 7], b"other")
    held, _ = hold(tree, tokens[:9])
    assert sorted(tree.forget()) == numbers(0, 8)
    assert match(tree, tokens) is None
    assert (tree.num_nodes, list(tree.nodes())) == (0, [])
    assert tree.lock(held) == 0
    again, known = insert(tree, tokens, [0, 1, 2, 3])
    assert known == 0
    assert tree.lock(again) == 4
    assert [tree.unlock(held), tree.unlock(held)] == [0, 0]
    assert found(tree, tokens) == ([0, 1, 2, 3], None)
    assert tree.unlock(again) == 4


# -- use ------------------------------------------------------------------------------------------------------------


def test_lock_and_unlock_are_use_of_the_whole_chain_and_of_nothing_else() -> None:
    tree = tree_of(4)
    leaf, _ = insert(tree, numbers(0, 16), [0, 1, 2, 3])
    held, _ = hold(tree, numbers(0, 8))
    assert (held.used, leaf.used) == (tree.clock, 0)
    tree.unlock(held)
    assert (held.used, leaf.used) == (2, 0)
    tree.lock(leaf)
    assert (held.used, leaf.used) == (3, 3)
    other, _ = insert(tree, numbers(50, 4), [5])
    tree.lock(other)
    upper, _ = insert(tree, numbers(0, 12), [0, 1, 9])
    assert (tree.clock, upper.used, upper.locks) == (4, 3, 1), "a split copies the use, too"


# -- against lists --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_random_inserts_are_found_as_a_search_through_all_of_them_finds(size: int) -> None:
    """Every block of every prompt by its prefix, in a dict; the first one stays."""
    rng = random.Random(size)
    tree, known, next_block = tree_of(size, partial_tokens=1), dict[tuple[int, ...], int](), 0
    for _ in range(400):
        tokens = rng.choices([0, 1, 2**31 - 1], weights=[6, 2, 1], k=rng.randint(0, 5 * size + 2))
        ends = range(size, len(tokens) + 1, size)
        if rng.random() < 0.5:
            blocks = numbers(next_block, len(ends))
            next_block += len(blocks)
            _, count = insert(tree, tokens[: len(blocks) * size], blocks)
            assert count == sum(tuple(tokens[:end]) in known for end in ends)
            for end, block in zip(ends, blocks, strict=True):
                known.setdefault(tuple(tokens[:end]), block)
        expected = [known[prefix] for end in ends if (prefix := tuple(tokens[:end])) in known]
        blocks, partial = found(tree, tokens)
        assert blocks == expected
        rest = tokens[len(blocks) * size :]
        if partial is not None:
            (prefix,) = (prefix for prefix, block in known.items() if block == partial[0])
            assert list(prefix[: len(blocks) * size]) == tokens[: len(blocks) * size]
            own = list(prefix[len(blocks) * size :])
            assert own[: partial[1]] == rest[: partial[1]]
            assert own[: partial[1] + 1] != rest[: partial[1] + 1]
        else:
            before = tuple(tokens[: len(blocks) * size])
            assert not any(p[:-size] == before and p[-size] == rest[0] for p in known if rest and len(p) > len(before))
    assert sorted(block for node in tree.nodes() for block in node.blocks) == sorted(known.values())
