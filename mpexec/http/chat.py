"""A model's chat template: messages to the prompt that the model was trained on."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mpexec.errors import ConfigError
from mpexec.http.openai import APIError, ChatRequest


class _GenerationMark(Extension):
    """`{% generation %}`, by which templates mark the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One Jinja template. It comes with the model, so it runs in Jinja's sandbox.

    Args:
        source: The template's text.
        special_tokens: Variables such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder: `chat_template.jinja`, else that of `tokenizer_config.json`; None without.

        Raises:
            ConfigError: A file cannot be read.
        """
        settings = _read_json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        try:
            source = file.read_text(encoding="utf-8") if file.is_file() else _default(settings.get("chat_template"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        return cls(source, _special_tokens(settings)) if source is not None else None

    @cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationMark]
        )
        # Templates are written for transformers, which offers these.
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        return environment.from_string(self._source)

    def render(self, request: ChatRequest) -> str:
        """The prompt, special tokens included, up to where the assistant's answer begins.

        Raises:
            APIError: The template refuses these messages, or is itself broken.
        """
        variables = {**self._special_tokens, **request.template_kwargs}
        try:
            return self._template.render(
                **{"tools": None, "documents": None, **variables},
                messages=list(request.messages),
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program: what it makes of odd messages can be any error
            raise APIError(
                400,
                f"the model's chat template refuses these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _default(templates: Any) -> str | None:
    """The template itself, or of several with names the one called "default"."""
    if isinstance(templates, list):
        templates = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
    if isinstance(templates, dict):
        templates = templates.get("default")
    return templates if isinstance(templates, str) else None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
