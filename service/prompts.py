"""Prompts: a text, a chat or token ids, as plain data, and what is checked of them."""

import math
from dataclasses import dataclass
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from protos.picovllm.inference.v1 import inference_pb2 as pb
from service.chat_template import RESERVED_VARIABLES
from service.served_model import ServedModel

Violations = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[dict[str, str], ...]
    add_generation_prompt: bool
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: list[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt
FIELD_OF_PROMPT = {ChatPrompt: "chat", TextPrompt: "text", TokenPrompt: "token_ids"}


def check_prompt(spec: pb.GenerationSpec, info: ServedModel, found: Violations) -> Prompt | None:
    """The prompt of a spec; what is wrong with it is added to ``found``."""
    kind = spec.WhichOneof("prompt")
    if spec.HasField("add_special_tokens") and kind != "text":
        found.append(("spec.add_special_tokens", "is for text only"))
    if kind == "text":
        return text_prompt(spec)
    if kind == "chat":
        return chat_prompt(spec.chat, "spec.chat", found)
    if kind == "token_ids":
        ids = list(spec.token_ids.ids)
        if not ids:
            found.append(("spec.token_ids.ids", "must hold at least one token"))
        check_ids(ids, "spec.token_ids.ids", info, found)
        return TokenPrompt(ids)
    found.append(("spec.prompt", "set one of text, token_ids and chat"))
    return None


def text_prompt(holder: pb.GenerationSpec | pb.TokenizeRequest) -> TextPrompt:
    add_special = holder.add_special_tokens if holder.HasField("add_special_tokens") else True
    return TextPrompt(holder.text, add_special)


def chat_prompt(chat: pb.Chat, path: str, found: Violations) -> ChatPrompt:
    if not chat.messages:
        found.append((f"{path}.messages", "must hold at least one message"))
    messages = tuple({"role": message.role, "content": message.content} for message in chat.messages)
    for index, message in enumerate(messages):
        if not message["role"]:
            found.append((f"{path}.messages[{index}].role", "must not be empty"))
    variables: dict[str, Any] = {}
    try:
        variables = _variables(chat.template_kwargs)
    except ValueError as error:
        found.append((f"{path}.template_kwargs", str(error)))
    for name in RESERVED_VARIABLES:
        if name in variables:
            found.append((f"{path}.template_kwargs", f"may not define {name}"))
    add_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return ChatPrompt(messages, add_prompt, variables)


def _variables(struct: Struct) -> dict[str, Any]:
    """Raises `ValueError` for a value that is none."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: Value) -> Any:
    """A Struct knows only doubles: whole numbers become integers again, as the caller wrote them."""
    match value.WhichOneof("kind"):
        case "null_value":
            return None
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise ValueError("NaN and infinities are not allowed")
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return _variables(value.struct_value)
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
    raise ValueError("holds a value without a kind")


def check_ids(ids: list[int], path: str, info: ServedModel, found: Violations) -> None:
    vocab = info.limits.vocab_size
    if ids and max(ids) >= vocab:
        index = next(i for i, token_id in enumerate(ids) if token_id >= vocab)
        found.append((f"{path}[{index}]", f"{ids[index]} is outside the vocabulary of {vocab}"))
