#!/usr/bin/env python3
"""Gather the wheels that this machine's pip would find on its own disk, for `docker/build.sh`.

    docker/local_wheels.py FOLDER LOCK...     hard-links wheels into FOLDER
    docker/local_wheels.py --pip-conf         prints pip's settings for the build, without local folders

Only files that a lock names by their hash are taken. FOLDER becomes an index of its own (FOLDER/simple), which
the build asks beside the machine's index.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

# Settings that mean the same inside the build. A proxy or a certificate is handed over apart from these.
CARRIED = ("index-url", "extra-index-url", "trusted-host", "timeout", "default-timeout", "retries", "proxy")
CERTIFICATE = "/run/secrets/ca"


def settings() -> dict[str, list[str]]:
    """pip's settings from its files and the environment; values of one name are added up."""
    output = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        key, _, value = line.partition("=")
        found.setdefault(key.rpartition(".")[2], []).extend(re.split(r"(?:\s|\\n)+", value.strip("'\"")))
    return found


def local_path(location: str) -> Path | None:
    """Folder of a file: URL or of a plain path; None for anything remote."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(location) if not parts.scheme and location else None


def locked(files: list[Path]) -> dict[str, set[str]]:
    """Hashes that the locks allow, by normalized package name."""
    allowed: dict[str, set[str]] = {}
    for file in files:
        name = ""
        for line in file.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"([A-Za-z0-9._-]+)==", line):
                name = normalized(match.group(1))
                allowed.setdefault(name, set())
            elif match := re.match(r"\s+--hash=sha256:(\w{64})", line):
                allowed[name].add(match.group(1))
    return allowed


def normalized(name: str) -> str:
    """Package name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def candidates(found: dict[str, list[str]], names: set[str]) -> Iterator[tuple[Path, str]]:
    """Wheels of these packages in local folders and local indexes, with the hash that an index gives ("": none)."""
    for location in found.get("find-links", []):
        folder = local_path(location)
        if folder is not None and folder.is_dir():
            yield from ((file, "") for file in folder.glob("*.whl") if normalized(file.name.split("-")[0]) in names)
    for location in (*found.get("index-url", []), *found.get("extra-index-url", [])):
        index = local_path(location) if location.startswith("file:") else None
        for name in sorted(names) if index is not None else ():
            page = index / name / "index.html"  # type: ignore[operator]
            if page.is_file():
                links = re.findall(r'href="([^"#]+\.whl)(?:#sha256=(\w{64}))?', page.read_text(encoding="utf-8"))
                for link, digest in links:
                    yield Path(os.path.normpath(page.parent / unquote(link))), digest


def gather(folder: Path, locks: list[Path]) -> list[Path]:
    """Link the wheels that the locks allow into `folder`; returns them."""
    allowed = locked(locks)
    for name in allowed:
        # An empty page too: pip warns of each one that an index lacks.
        (folder / "simple" / name).mkdir(parents=True)
        (folder / "simple" / name / "index.html").touch()
    gathered = []
    for file, given in candidates(settings(), set(allowed)):
        name = normalized(file.name.split("-")[0])
        # pip reads the whole file and compares again when it installs it.
        digest = given or hashlib.sha256(file.read_bytes()).hexdigest()
        target = folder / "simple" / name / file.name
        if digest not in allowed[name] or target.exists():
            continue
        try:
            os.link(file.resolve(), target)
        except OSError:
            # Another file system, or one that allows no links.
            shutil.copyfile(file, target)
        with (target.parent / "index.html").open("a", encoding="utf-8") as page:
            page.write(f'<a href="{quote(file.name)}#sha256={digest}">{file.name}</a>\n')
        gathered.append(target)
    return gathered


def pip_conf(found: dict[str, list[str]]) -> str:
    """A pip.conf for the build."""
    lines = ["[global]", "disable-pip-version-check = true"]
    for name in CARRIED:
        values = [value for value in found.get(name, []) if value and not value.startswith("file:")]
        if values:
            lines.append(f"{name} = {' '.join(values)}")
    if found.get("cert"):
        lines.append(f"cert = {CERTIFICATE}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """See the module's docstring."""
    if arguments == ["--pip-conf"]:
        print(pip_conf(settings()), end="")
        return 0
    folder, *locks = map(Path, arguments)
    gathered = gather(folder, locks)
    print(f"{len(gathered)} wheels of this machine, {sum(f.stat().st_size for f in gathered) / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
