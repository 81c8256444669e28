"""Where configurations are looked for: as given, then among those that come with the package.

Imports nothing heavy: the command's help lists the shipped names.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from service.errors import UserError

_PACKAGE = Path(__file__).resolve().parent.parent
_SUFFIXES = ("", ".yaml", ".yml")


def shipped_directory() -> Path:
    """The directory of the shipped configurations.

    In a wheel they are the data of `service.configs`; in a checkout they lie at the top of the repository.
    """
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def shipped_configs() -> dict[str, Path]:
    """Name to path of every shipped configuration, by name."""
    return {path.stem: path for path in sorted(shipped_directory().glob("*.yaml"), key=lambda path: path.stem)}


def find_config(source: str | Path, beside: Path | None = None) -> Path:
    """The file that `source` means: as given (from `beside`), else shipped; .yaml may be left out."""
    if beside is None and os.path.isfile(source):  # a name may hold `$`
        return Path(source)
    given = Path(os.path.expandvars(os.path.expanduser(str(source))))
    for suffix in _SUFFIXES:
        path = (beside or Path()) / (str(given) + suffix)
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long or a closed directory
            return path
    shipped = shipped_configs()
    # `configs/base.yaml`, as the README writes it, means the same where there is no checkout.
    if str(given.parent) in (".", "configs"):
        name = given.stem if given.suffix in _SUFFIXES else given.name
        if name in shipped:
            return shipped[name]
    near = difflib.get_close_matches(given.stem, shipped, n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped: {', '.join(shipped) or 'none'}"
    raise UserError(f"no configuration {source}: neither a file nor shipped with hiera-train; {hint}")
