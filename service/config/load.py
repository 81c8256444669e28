"""From a YAML file, the file it extends, and `--set` overrides to a checked RunConfig.

Order: the extended file, then the file, then the overrides; lists are replaced, not merged. Every
mistake ends in one UserError of one or two lines that names the place, the field and the remedy.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.config import yamlfile
from service.config.checks import check_settings
from service.config.fields import Section, subsection
from service.config.schema import BUILTIN, RunConfig
from service.config.shipped import find_config
from service.config.wording import accepts, field_error, resolve, sections
from service.errors import UserError

EXTENDS = "extends"


def load_config(source: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in `source` (a path, or the name of a shipped one; None: the defaults), overridden.

    Args:
        source: see `find_config`.
        overrides: texts `section.field=value`; the last one of a field wins.

    Raises:
        UserError: anything wrong that can be known without looking at the data or the machine.
    """
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if source is not None:
        data, origins = _read_chain(find_config(source))
    for override in overrides:
        dotted, value = _parse_override(override)
        *sections, name = dotted.split(".")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
        origins.pop(dotted, None)
    config = _validate(data, origins)
    check_settings(config)
    return _with_absolute_paths(config)


def dump_config(config: RunConfig) -> str:
    """The whole configuration as YAML; `load_config` of it gives an equal one."""
    return yamlfile.dump(config.model_dump(mode="json"))


def known_fields() -> list[str]:
    """Every field as section.field or section.subsection.field, in the order of the schema."""
    return list(_fields(RunConfig, ""))


def _fields(section: type[Section], prefix: str) -> Iterator[str]:
    for name in section.model_fields:
        inner = subsection(section, name)
        if inner is None:
            yield prefix + name
        else:
            yield from _fields(inner, f"{prefix}{name}.")


def unknown_key(path: str) -> str:
    """What is wrong with a key that does not exist, and the nearest one that does."""
    fields = known_fields()
    leaves: dict[str, str] = {}
    for known in fields:
        leaves.setdefault(known.rsplit(".", 1)[-1], known)
    leaf = path.rsplit(".", 1)[-1]
    # The right name in the wrong section, a slip in section or name, a slip in the name alone.
    same_name = [known for known in fields if known.rsplit(".", 1)[-1] == leaf]
    near = difflib.get_close_matches(path, same_name, n=1, cutoff=0.0)
    near = near or difflib.get_close_matches(path, [*fields, *RunConfig.model_fields], n=1, cutoff=0.7)
    near = near or [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.5)]
    hint = f"did you mean {near[0]}?" if near else f"the sections are {', '.join(RunConfig.model_fields)}"
    return f"unknown key {path}; {hint}"


def _read_chain(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Sections of `path` over those of the file that it extends, and where each key comes from."""
    data, origins = _read_sections(path)
    if EXTENDS not in data:
        return data, origins
    base_name = data.pop(EXTENDS)
    here = origins.pop(EXTENDS)
    if not isinstance(base_name, str) or not base_name:
        raise UserError(f"{here}: {EXTENDS}: {base_name!r} is not the name of a configuration file")
    base_path = find_config(base_name, beside=path.parent)
    if base_path.resolve() == path.resolve():
        raise UserError(f"{here}: {EXTENDS}: {path.name} extends itself")
    base, base_origins = _read_sections(base_path)
    if EXTENDS in base:
        raise UserError(f"{here}: {EXTENDS}: {base_name} extends {base[EXTENDS]}; only one level is allowed")
    for section, values in data.items():
        _merge(base.setdefault(section, {}), values, section)
    return base, {**base_origins, **origins}


def _merge(base: dict[str, Any], values: dict[str, Any], path: str) -> None:
    """Fields of `values` over those of `base`; a subsection is merged, any other value is replaced."""
    for name, value in values.items():
        if f"{path}.{name}" in sections():
            _merge(base.setdefault(name, {}), value, f"{path}.{name}")
        else:
            base[name] = value


def _read_sections(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    document = yamlfile.read(path)
    data = {} if document.data is None else document.data
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else repr(data)
        raise UserError(f"{path}: expected sections ({', '.join(RunConfig.model_fields)}), found {kind}")
    origins = {dotted: f"{path}:{line}" for dotted, line in document.lines.items()}
    _check_keys(data, "", origins)
    return data, origins


def _check_keys(values: dict[str, Any], path: str, origins: dict[str, str]) -> None:
    for name, value in values.items():
        dotted = path + name
        if dotted == EXTENDS:
            continue
        if dotted not in sections():
            if dotted not in known_fields():
                raise UserError(f"{origins[dotted]}: {unknown_key(dotted)}")
        elif value is None:  # a section whose keys are all commented out
            values[name] = {}
        elif not isinstance(value, dict):
            raise UserError(f"{origins[dotted]}: {dotted}: {value!r} is not a section of fields")
        else:
            _check_keys(value, f"{dotted}.", origins)


def _parse_override(override: str) -> tuple[str, Any]:
    """`section.field=value` to (section.field, value), the value read as the field's type wants it."""
    dotted, equals, text = override.partition("=")
    dotted = dotted.strip()
    if not equals:
        raise UserError(f"--set {override}: write section.field=value, e.g. --set train.global_batch=1024")
    if dotted in sections():
        example = next(known for known in known_fields() if known.startswith(f"{dotted}."))
        raise UserError(f"--set {override}: {dotted} is a section; set one of its fields, e.g. {example}")
    if dotted not in known_fields():
        raise UserError(f"--set {override}: {unknown_key(dotted)}")
    return dotted, _typed(dotted, text)


def _typed(dotted: str, text: str) -> Any:
    """Text of an override as a value for this field; what does not fit is left for validation to refuse."""
    schema = resolve(dotted)
    stripped = text.strip()
    if stripped == "null" and accepts(schema, "null"):
        return None
    if stripped in _choices(schema):
        return stripped
    kinds = [kind for kind in ("integer", "number", "array") if accepts(schema, kind)]
    if accepts(schema, "string") and not kinds:
        return text
    if accepts(schema, "object"):
        # As in YAML; {A: 1, B: x} without its braces is a mapping too.
        inner = stripped if stripped.startswith("{") else f"{{{stripped}}}"
        return yamlfile.parse(inner, f"--set {dotted}={text}").data
    if accepts(schema, "array"):
        # 448,448 and a lone 1024 are lists too; brackets need quoting in some shells.
        inner = stripped if stripped.startswith("[") else f"[{stripped}]"
        return yamlfile.parse(inner, f"--set {dotted}={text}").data
    return yamlfile.scalar(stripped)


def _choices(schema: dict[str, Any]) -> Iterator[str]:
    for option in schema.get("anyOf", [schema]):
        yield from (choice for choice in option.get("enum", [option.get("const")]) if isinstance(choice, str))


def _validate(data: dict[str, Any], origins: dict[str, str]) -> RunConfig:
    # Through JSON, because pydantic's strict mode (no "3" for 3, no true for 1) still takes a JSON list for a
    # tuple and JSON text for a path.
    try:
        return RunConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = [field_error(detail, data) for detail in error.errors(include_url=False)]
    fields = list(dict.fromkeys(dotted for dotted, _ in problems))
    dotted, problem = problems[0]
    origin = origins.get(dotted)
    # Of a union every branch complains; the field's own expectation says it once.
    message = f"{origin}: {problem}" if origin else problem
    if len(fields) > 1:
        message += f"\nalso wrong: {', '.join(fields[1:])}"
    raise UserError(message)


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Relative paths start at the current directory; the resolved run.yaml must mean the same anywhere."""
    changed = {section: _absolute(getattr(config, section)) for section in RunConfig.model_fields}
    return config.model_copy(update=changed)


def _absolute(section: Section) -> Section:
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            changed[name] = _absolute(value)
        elif isinstance(value, Path) and not str(value).startswith(BUILTIN):
            changed[name] = Path(os.path.abspath(value))
    return section.model_copy(update=changed)
