"""Field types that several sections of the configuration share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

_VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{([^}]*)\})")


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys are errors, attribute docstrings are descriptions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def subsection(section: type[BaseModel], name: str) -> type[Section] | None:
    """The class of a field that is itself a section; None for any other field."""
    annotation = section.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def expand_path(value: Any) -> Any:
    """`~`, `~user`, `$VAR` and `${VAR}` of a path replaced, once; ValueError if one is not set; `$$` is `$`.

    A value that is not text is returned as it is, for pydantic to judge.
    """
    if not isinstance(value, str):
        return value
    if not value:
        raise ValueError("an empty path; use null for none")
    if "\0" in value:
        raise ValueError("a path cannot hold a NUL character")

    def variable(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[3]
        if not os.environ.get(name):
            raise ValueError(f"environment variable ${name} is not set or empty")
        return os.environ[name]

    # `~` first: what a variable holds is taken as it is, and is not expanded again.
    head = os.path.expanduser(value)
    if head.startswith("~"):
        raise ValueError(f"{value.split('/', 1)[0]}: no such home directory; give the full path")
    return _VARIABLE.sub(variable, head)


def _unexpanded(path: Path) -> str:
    """Text that expands to this path: what a dumped configuration says is read back as the same."""
    return str(path).replace("$", "$$")


ExpandedPath = Annotated[
    Path, BeforeValidator(expand_path), PlainSerializer(_unexpanded, return_type=str, when_used="json")
]
"""A path in which `~` and environment variables are expanded."""

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]

ONE_LINE = r"^[^\x00-\x1f\x7f]+$"
PATTERN_WORDS = {ONE_LINE: "text of one line"}
"""What a pattern accepts, in words; of other patterns a name is expected."""
OneLine = Annotated[str, Field(pattern=ONE_LINE)]
"""Text without control characters, at least one character."""

MAX_DIMENSIONS = 3
Sizes = Annotated[tuple[Positive, ...], Field(min_length=1, max_length=MAX_DIMENSIONS)]
"""One positive whole number a spatial dimension: (length,), (height, width) or (frames, height, width)."""
Paddings = Annotated[tuple[Natural, ...], Field(min_length=1, max_length=MAX_DIMENSIONS)]
"""As Sizes, where 0 is allowed."""
