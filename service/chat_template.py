"""Chat templates: a model's Jinja template in a sandbox, with the helpers that published templates use."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest, ModelError

RESERVED_VARIABLES = ("messages", "add_generation_prompt")
_TEMPLATE_FAULTS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks assistant text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `render` is pure and may run in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `ModelError` when the template does not compile."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = _compile(source)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. Raises `InvalidRequest` on field ``chat`` when the template refuses it."""
        context: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        context.update(messages=list(messages), add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(context)
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest([("chat", f"the model's chat template refuses it: {_one_line(error)}")]) from error


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loop_controls]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError(f"the chat template does not compile: {_one_line(error)}") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Not Jinja's own filter: that one escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
