"""Everything slow between a request message and the engine: checks, template, tokenising. Runs in threads."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import EngineError, InvalidRequest
from service.errors import field_errors, from_engine
from service.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from service.served_model import ServedModel
from service.tokenizer import Tokenizer
from service.validate import Generation


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request that fits the model. ``max_tokens`` per output; ``echo_text`` is empty unless asked for."""

    generation: Generation
    prompt: list[int]
    max_tokens: int
    echo_text: str


def prepare(check: Callable[[], Generation], tokenizer: Tokenizer, model: ServedModel) -> Prepared:
    """``check`` makes the `Generation` from the message. Raises `ServiceError`."""
    generation = check()
    try:
        prompt = encode_prompt(generation.prompt, tokenizer)
        max_tokens = model.limits.resolve_max_tokens(len(prompt), generation.params)
    except EngineError as error:
        raise from_engine(error, generation.path_of) from error
    echo_text = _echo_text(generation, prompt, tokenizer) if generation.echo else ""
    return Prepared(generation, prompt, max_tokens, echo_text)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Raises `InvalidRequest` when the chat template refuses."""
    match prompt:
        case TokenPrompt(ids):
            return ids
        case TextPrompt(text, add_special_tokens):
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        case ChatPrompt(messages, add_generation_prompt, variables):
            return tokenizer.encode_chat(
                messages, add_generation_prompt=add_generation_prompt, variables=variables
            )


def tokenize(check: Callable[[], TextPrompt | ChatPrompt], tokenizer: Tokenizer) -> list[int]:
    """For the Tokenize call. Raises `ServiceError`."""
    try:
        return encode_prompt(check(), tokenizer)
    except InvalidRequest as error:
        raise field_errors(error.violations) from error


def _echo_text(generation: Generation, prompt: list[int], tokenizer: Tokenizer) -> str:
    """A text is echoed as it came; other prompts as Detokenize gives them."""
    if isinstance(generation.prompt, TextPrompt):
        return generation.prompt.text
    return tokenizer.decode(prompt, skip_special_tokens=generation.skip_special_tokens)
