"""Integers that order as logits do, and lists of them: what the sampling kernels compare.

A key (int32) orders as its float32 does, with NaN above everything and -0 equal to 0. A rank (int64) is the key in the
upper half and the id in the lower one, the lowest id being the greatest: one comparison tells the better of two tokens.
"""

import triton
import triton.language as tl

# In kernels a constant has to be a constexpr. The last two are the keys of the largest and the smallest finite float32.
LOWEST_KEY = tl.constexpr(-(2**31))
HIGHEST_KEY = tl.constexpr(2**31 - 1)
LOWEST_RANK = tl.constexpr(-(2**63))
LARGEST_FINITE = tl.constexpr(0x7F7FFFFF)
SMALLEST_FINITE = tl.constexpr(-0x7F800000)
# How far a row is: not filtered at all, cut still searched for, cut found but for min_p.
NOT_FILTERED, SEARCHED, SETTLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Weight 1 as an integer: a vocabulary of 2^22 of them can be added.
ONE = tl.constexpr(2.0**40)


@triton.jit
def key_of(x):
    """float32 to key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, HIGHEST_KEY, key)


@triton.jit
def float_of(key):
    """Key to the float32 that has it; NaN for the highest."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def rank_of(key, ids):
    """Key and token id (int32) to rank."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def key_of_rank(rank):
    return (rank >> 32).to(tl.int32)


@triton.jit
def id_of_rank(rank):
    """int64."""
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


# -- lists of found tokens -------------------------------------------------------------------------------------------
# ``ranks``: at most MAX_FOUND of them, in any order; ``found``: their number, their lowest and their highest key.


@triton.jit
def reset_found(found):
    tl.store(found, 0)
    tl.store(found + 1, HIGHEST_KEY)
    tl.store(found + 2, LOWEST_KEY)


@triton.jit
def append(member, rank, found, ranks, MAX_FOUND: tl.constexpr):
    """Append the ranks of the members to the list, and note their number and keys, even if they do not fit."""
    number = tl.sum(member.to(tl.int32), axis=0)
    if number > 0:
        key = key_of_rank(rank)
        tl.atomic_min(found + 1, tl.min(tl.where(member, key, HIGHEST_KEY), axis=0))
        tl.atomic_max(found + 2, tl.max(tl.where(member, key, LOWEST_KEY), axis=0))
        i = tl.atomic_add(found, number) + tl.cumsum(member.to(tl.int32), axis=0) - 1
        tl.store(ranks + i, rank, mask=member & (i < MAX_FOUND))


@triton.jit
def weight_of(ranks, best):
    """exp(logit - best) as an integer: its sums depend on no order. 0 for the lowest rank, which no token has."""
    exists = ranks > LOWEST_RANK
    x = tl.where(exists, float_of(key_of_rank(ranks)), best)
    return tl.where(exists, (tl.exp(x - best) * ONE).to(tl.int64), 0)


@triton.jit
def amount_before(mine, ranks, number, best, WEIGH: tl.constexpr, MAX_FOUND: tl.constexpr):
    """Number or weight (int64) of the found tokens that rank before each of ``mine``."""
    before = tl.zeros((MAX_FOUND,), tl.int64)
    for start in range(0, number, 16):
        j = start + tl.arange(0, 16)
        others = tl.load(ranks + j, mask=j < number, other=LOWEST_RANK)
        amount = weight_of(others, best) if WEIGH else tl.full((16,), 1, tl.int64)
        before += tl.sum(tl.where(others[:, None] > mine[None, :], amount[:, None], 0), axis=0)
    return before


@triton.jit
def lowest_of(ranks, stays):
    """The lowest rank of those that stay: never none, since the first one has nothing before it."""
    return tl.min(tl.where(stays, ranks, 0x7FFFFFFFFFFFFFFF), axis=0)
