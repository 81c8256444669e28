"""Reading and writing the YAML of configurations, with the place of every key.

Two habits of PyYAML's default rules make configurations say something else than they seem to: `8e-4`
is text (the rules of YAML 1.1 want `8.0e-4`), and `on`, `off`, `yes`, `no` and `2024-01-01` are not
text. Here the scalars follow YAML 1.2's core schema instead, plus `_` between digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from service.errors import UserError

MAX_DEPTH = 20
"""Nesting beyond this is an alias that contains itself, not a configuration."""

_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9](?:_?[0-9])*$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9](?:_?[0-9])*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Scalars stay text here; `scalar` below gives them their types."""


_Loader.yaml_implicit_resolvers = {}


class _Dumper(yaml.SafeDumper):
    """Quotes what either set of rules would take for something else than text."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


def scalar(text: str) -> Any:
    """The value of a plain (unquoted) scalar: None, bool, int, float or str."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


@dataclass
class Document:
    """A parsed YAML file: its data and, for each dotted key, the 1-based line it stands on."""

    data: Any
    lines: dict[str, int] = field(default_factory=dict)


def parse(text: str, name: str) -> Document:
    """YAML text to plain values. UserError, naming the line, if it does not parse or repeats a key."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        document = Document(None)
        document.data = None if node is None else _value(node, "", name, document.lines, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = error.problem or error.context or "not YAML"
        where = f" ({error.context})" if error.context and error.problem else ""
        raise UserError(f"{name}{line}: {problem}{where}") from None
    except RecursionError:
        raise UserError(f"{name}: nested too deeply") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not YAML text: {str(error).splitlines()[0]}") from None
    return document


def read(path: Path) -> Document:
    """`parse` of a file. UserError if it cannot be read or is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(text, str(path))


def dump(data: Any) -> str:
    """YAML text of plain values; reading it back gives the same values."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    return text


def _value(node: yaml.Node, path: str, name: str, lines: dict[str, int], depth: int) -> Any:
    line = node.start_mark.line + 1
    if depth > MAX_DEPTH:
        raise UserError(f"{name}:{line}: nested too deeply")
    if node.tag not in _PLAIN_TAGS:
        raise UserError(f"{name}:{line}: the tag {node.tag} is not allowed; write plain values")
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"{name}:{key_line}: a key must be a word, not a list or a mapping")
            key = key_node.value
            dotted = f"{path}.{key}" if path else key
            if key in mapping:
                raise UserError(f"{name}:{key_line}: {dotted} is given twice, first on line {lines[dotted]}")
            lines[dotted] = key_line
            mapping[key] = _value(value_node, dotted, name, lines, depth + 1)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, path, name, lines, depth + 1) for item in node.value]
    if isinstance(node, yaml.ScalarNode) and node.style is not None:
        return node.value  # quoted or a block: text, whatever it holds
    return scalar(node.value)
