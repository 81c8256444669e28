"""What a field expects and what is wrong with a value, in words, from the JSON schema."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from service.config.fields import PATTERN_WORDS, subsection
from service.config.schema import RunConfig

_NOUNS = {
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "string": ("text", "texts"),
    "null": ("null", "null"),
}
_BOUNDS = (
    ("exclusiveMinimum", "above {}"),
    ("minimum", "at least {}"),
    ("exclusiveMaximum", "below {}"),
    ("maximum", "at most {}"),
)


@functools.cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def resolve(dotted: str) -> dict[str, Any]:
    """JSON schema of one field, e.g. "train.steps"."""
    field: dict[str, Any] = _schema()
    for name in dotted.split("."):
        if "$ref" in field:
            field = _schema()["$defs"][field["$ref"].rsplit("/", 1)[-1]]
        field = field["properties"][name]
    return field


@functools.cache
def sections() -> frozenset[str]:
    """Sections and subsections by their dotted names."""

    def walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name in model.model_fields:
            inner = subsection(model, name)
            if inner is not None:
                yield prefix + name
                yield from walk(inner, f"{prefix}{name}.")

    return frozenset(walk(RunConfig, ""))


def accepts(schema: dict[str, Any], kind: str) -> bool:
    """Whether a field takes values of this JSON type."""
    return any(option.get("type") == kind for option in schema.get("anyOf", [schema]))


def expected(dotted: str) -> str:
    """What a field takes, in words: "a whole number above 0, or null"."""
    options = resolve(dotted).get("anyOf", [resolve(dotted)])
    words = [_describe(option) for option in options]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f", or {words[-1]}"


def _describe(option: dict[str, Any]) -> str:
    if "const" in option:
        return str(option["const"])
    if "enum" in option:
        return "one of " + ", ".join(map(str, option["enum"]))
    if option.get("type") == "array":
        items = option["prefixItems"][0] if "prefixItems" in option else option["items"]
        least, most = option.get("minItems", 0), option.get("maxItems")
        count = f"{least} " if least == most else f"{least} to {most} " if most else ""
        return f"a list of {count}{_NOUNS[items['type']][1]}{_bounds(items, each=True)}"
    if option.get("type") == "object":
        return "a mapping of names to texts"
    if option.get("format") == "path":
        return "a path"
    if "pattern" in option:
        return PATTERN_WORDS.get(option["pattern"], "a name of letters, digits, '.', '_' and '-'")
    if option.get("minLength"):
        return "text that is not empty"
    return _NOUNS[option["type"]][0] + _bounds(option)


def _bounds(option: dict[str, Any], each: bool = False) -> str:
    parts = [words.format(option[key]) for key, words in _BOUNDS if key in option]
    return (" each " if each else " ") + " and ".join(parts) if parts else ""


def field_error(detail: Any, data: dict[str, Any]) -> tuple[str, str]:
    """One of pydantic's error details to (dotted field, "field: value is not what is expected")."""
    location = [str(part) for part in detail["loc"]]
    # A subsection's fields are one level deeper than a section's.
    depth = max(1, sum(".".join(location[:end]) in sections() for end in range(1, len(location) + 1)))
    section = ".".join(location[:depth])
    if detail["type"] == "value_error" and "ctx" in detail:
        reason = str(detail["ctx"]["error"])
        if len(location) == depth:  # a validator of a whole section; its message starts with the field
            dotted = f"{section}.{reason.split(':', 1)[0]}"
            return dotted, f"{section}.{reason}"
        dotted = f"{section}.{location[depth]}"
        return dotted, f"{dotted}: {reason}"
    dotted = f"{section}.{location[depth]}" if len(location) > depth else section
    value = detail["input"]
    if len(location) > depth:
        value = functools.reduce(lambda inner, name: inner.get(name, {}), location[:depth], data)
        value = value.get(location[depth])
    return dotted, f"{dotted}: {_show(value)} is not {expected(dotted)}"


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        text = json.dumps(value)
    else:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
