"""Token tables made on the fly: any byte string can be a token, so texts can be split at every byte."""

from collections.abc import Sequence
from itertools import pairwise

from service.token_bytes import TokenTable


def table_of(pieces: Sequence[bytes], special: Sequence[int] = (), *, per_byte: bool = False) -> TokenTable:
    return TokenTable(tuple(pieces), frozenset(special), per_byte=per_byte, strips_leading_space=False)


def split(raw: bytes, cuts: Sequence[int]) -> list[bytes]:
    """``raw`` cut at the given positions (out of order and out of range are fine)."""
    bounds = [0, *sorted({cut % (len(raw) + 1) for cut in cuts}), len(raw)]
    return [raw[a:b] for a, b in pairwise(bounds) if a < b]
