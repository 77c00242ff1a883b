"""The tokenizer of a model directory: text and chats to token ids and back. Every method may run in any thread."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from engine.errors import InvalidRequest, ModelError
from service.chat_template import ChatTemplate
from service.text import decode_tokens
from service.token_bytes import TokenTable, build_table

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """``table`` maps ids to bytes; ``chat_template`` is None for a model without one.

    ``fingerprint``: SHA-256 of tokenizer.json and the template.
    """

    def __init__(self, fast: FastTokenizer, table: TokenTable, template: ChatTemplate | None, fingerprint: str) -> None:
        self._fast = fast
        self.table = table
        self.chat_template = template
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``. Raises `ModelError`."""
        folder = Path(directory)
        raw = _read(folder / "tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        try:
            fast = FastTokenizer.from_str(raw)
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ModelError(f"{folder / 'tokenizer.json'}: {' '.join(str(error).split())[:200]}") from error
        fast.no_truncation()
        fast.no_padding()
        special = frozenset(i for i, added in fast.get_added_tokens_decoder().items() if added.special)
        table = build_table(json.loads(raw).get("decoder"), fast.get_vocab(with_added_tokens=True), special)
        source = _template_source(folder, config)
        template = None if source is None else ChatTemplate(source, _special_tokens(config))
        fingerprint = hashlib.sha256(f"{raw}\0{source or ''}".encode()).hexdigest()
        return cls(fast, table, template, fingerprint)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. The batch call releases the interpreter lock; the single one holds it for seconds."""
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a rendered conversation, with the special tokens its template writes and no others."""
        if self.chat_template is None:
            raise InvalidRequest([("chat", "the model has no chat template; use text or token_ids")])
        text = self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that make no character are U+FFFD."""
        return decode_tokens(self.table, token_ids, skip_special_tokens=skip_special_tokens)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model directory needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The file wins over the entry in tokenizer_config.json; of several named templates the one called default."""
    if (folder / "chat_template.jinja").exists():
        return _read(folder / "chat_template.jinja")
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    if entry is not None and not isinstance(entry, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string")
    return entry


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and so on for the template; each is a string or an object with ``content``."""
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
