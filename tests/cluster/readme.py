"""The commands of a section of the README, as a shell would part them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from string import Template

README = Path(__file__).parents[2] / "README.md"


def commands(section: str, variables: Mapping[str, str]) -> list[list[str]]:
    """Words of the commands in a section's first bash block, with `$NAME` replaced."""
    text = README.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    match = re.search(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"the section {section} has no commands"
    lines = Template(match.group(1).replace("\\\n", " ")).substitute(variables).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
