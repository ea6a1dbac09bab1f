"""A model's chat template, rendered with jinja2 as the libraries of the field do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class TemplateError(ValueError):
    """The model has no chat template, or the template refuses the messages."""


def render_chat(directory: Path, messages: list[dict[str, Any]], **variables: Any) -> str:
    """The prompt text of `messages` (role, content, ...), ending where the assistant's answer begins. Raises TemplateError.

    Further `variables` (enable_thinking, tools, reasoning_effort, ...) reach the template as they are.
    """
    from jinja2 import TemplateError as JinjaError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(_template(directory)).render(messages=messages, add_generation_prompt=True, **variables)
    except (TemplateError, MemoryError):
        raise
    except JinjaError as error:
        raise TemplateError(f"the chat template failed: {error}") from None
    except Exception as error:  # noqa: BLE001 - a template is a program, and not ours: whatever it raises is its own failure
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from None


def _template(directory: Path) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _text(path)
    config = directory / "tokenizer_config.json"
    if config.is_file():
        try:
            values = json.loads(_text(config))
        except (json.JSONDecodeError, RecursionError) as error:
            raise TemplateError(f"{config}: not JSON ({error})") from None
        template = values.get("chat_template") if isinstance(values, dict) else None
        if isinstance(template, str):
            return template
    raise TemplateError(f"{directory}: the model has no chat template (chat_template.jinja)")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path}: not UTF-8 at byte {error.start}") from None
