"""Which tile each product of the decode chain uses: measured per shape, fixed in `tiles.json`, never tuned at start.

`bench/decode_step.py` measures and writes the file; every entry keeps the time it won with and where. A shape that is
not in the file gets the rule of thumb below.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from kernels.gpu.gemv import GemvTile
from kernels.gpu.skinny_gemm import SkinnyTile, padded_tokens

TILES_FILE = Path(__file__).with_name("tiles.json")
# Programs that keep every multiprocessor of a large GPU reading.
ENOUGH_PROGRAMS = 128


@cache
def measured_tiles() -> dict[str, dict[str, Any]]:
    """Entries of the file, by key: the tile's fields under ``tile``, and what they were measured with."""
    content: dict[str, Any] = json.loads(TILES_FILE.read_text(encoding="utf-8"))
    entries: dict[str, dict[str, Any]] = content["entries"]
    return entries


def gemv_key(kind: str, rows: int, inner: int) -> str:
    """``kind``: qkv, add, gate_up or head."""
    return f"gemv/{kind}/{rows}x{inner}"


def skinny_key(kind: str, rows: int, inner: int, tokens: int) -> str:
    """``kind``: gemm, gate_up, head; folded and folded_gate_up where the product computes the norm or adds itself."""
    return f"skinny/{kind}/{rows}x{inner}/{padded_tokens(tokens)}"


def gemv_tile(kind: str, rows: int, inner: int, divides: int | None = None) -> GemvTile:
    """The tile of a one-token product of ``rows`` x ``inner``; its rows divide ``divides`` where that is given."""
    entry = measured_tiles().get(gemv_key(kind, rows, inner))
    if entry is not None:
        return GemvTile(**entry["tile"])
    tile_rows = {"qkv": 4, "add": 4, "gate_up": 8, "head": 8}[kind]
    while divides is not None and divides % tile_rows:
        tile_rows //= 2
    return GemvTile(tile_rows, 512 if inner >= 512 else 256, 4)


def skinny_tile(kind: str, rows: int, inner: int, tokens: int) -> SkinnyTile:
    """The tile of a product of ``rows`` x ``inner`` for up to 64 tokens."""
    entry = measured_tiles().get(skinny_key(kind, rows, inner, tokens))
    if entry is not None:
        return SkinnyTile(**entry["tile"])
    if kind == "folded":  # without splits, few rows for many programs
        return SkinnyTile(16, 128, 1, 4)
    if kind != "gemm":
        return SkinnyTile(64, 64, 1, 4)
    splits = 1
    while splits < 8 and -(-rows // 64) * splits < ENOUGH_PROGRAMS and inner // (2 * splits) >= 128:
        splits *= 2
    return SkinnyTile(64, 64, splits, 4)
