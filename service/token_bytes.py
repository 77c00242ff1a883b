"""Token id -> bytes: what each token adds to the text, for the two decoders served.

ByteLevel (GPT-2, Llama 3, Qwen, SmolLM2): every character of a token stands for one byte.
ByteFallback (SentencePiece style: Llama 2, Mistral, Gemma): U+2581 is a space, ``<0xE4>`` is the byte E4.
Any other decoder is refused by name, since its text cannot be built token by token without guessing.
"""

import re
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """``pieces[id]`` are the bytes of a token; ``special`` the ids that skip_special_tokens leaves out.

    ``per_byte``: each invalid byte becomes its own U+FFFD (ByteFallback), instead of one per maximal
    invalid sequence (ByteLevel). ``strips_leading_space``: a text decoded from its start loses one space.
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int]
    per_byte: bool
    strips_leading_space: bool

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for ids the model has but the tokenizer does not."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


def build_table(decoder: dict[str, Any] | None, vocab: dict[str, int], special: frozenset[int]) -> TokenTable:
    """The table for a ``tokenizer.json``; ``decoder`` is its entry of that name. Raises `ModelError`."""
    kind = _decoder_kind(decoder)
    to_bytes = _byte_level_bytes if kind == "ByteLevel" else _fallback_bytes
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = to_bytes(token)
    strips = kind == "ByteFallback" and _strips_leading_space(decoder)
    return TokenTable(tuple(pieces), special, per_byte=kind == "ByteFallback", strips_leading_space=strips)


def _decoder_kind(decoder: dict[str, Any] | None) -> str:
    steps = _steps(decoder)
    names = [step.get("type", "?") for step in steps]
    inert_before_byte_level = {"ByteFallback", "Fuse", "Replace"}
    if names and names[-1] == "ByteLevel" and inert_before_byte_level.issuperset(names[:-1]):
        return "ByteLevel"
    known = {"Replace", "ByteFallback", "Fuse", "Strip"}.issuperset(names)
    if known and "ByteFallback" in names and all(_is_space_mark(step) for step in steps if step["type"] == "Replace"):
        return "ByteFallback"
    described = " + ".join(names) if names else "none"
    raise ModelError(
        f"tokenizer.json: decoder {described} is not supported; "
        "supported are ByteLevel and Replace + ByteFallback + Fuse"
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _is_space_mark(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": _SPACE_MARK} and step.get("content") == " "


def _strips_leading_space(decoder: dict[str, Any] | None) -> bool:
    return any(s["type"] == "Strip" and s.get("content") == " " and s.get("start") == 1 for s in _steps(decoder))


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their own byte, the others are shifted above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    shifted = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(shifted)})
    return table


_BYTE_OF_CHARACTER = _byte_characters()


def _byte_level_bytes(token: str) -> bytes:
    """Added tokens may hold characters outside the alphabet (a space): then the token is its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _fallback_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()
