"""Shell metacharacters in every string of a configuration: taken literally by a run of the real image, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import pytest
from pydantic import BaseModel

from service.config.load import load_config
from service.config.schema import RunConfig
from service.errors import EXIT_CONFIG, EXIT_FINISHED, UserError
from tests.image.conftest import write_config
from tests.image.podman import Container, Volumes, run, wait_for

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(3000)]

SHELL = "a b;touch /runs/pwned $(touch /runs/pwned) `touch /runs/pwned` 'q' \"d\" & | > /runs/pwned * ? # % \\ ~"
NAME = SHELL.replace("/", "|")
"""The same as the name of a file."""


def strings(model: type[BaseModel] = RunConfig, *prefix: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every field that holds free text, with the metacharacters as a value of its type."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from strings(kind, *prefix, name)
        elif "dict[str, str]" in str(kind):
            yield (*prefix, name), {"KEY": SHELL}
        elif get_origin(kind) is tuple and "str" in str(kind):
            yield (*prefix, name), [SHELL]
        elif "Path" in str(kind):
            yield (*prefix, name), f"/runs/{NAME}"
        elif kind is str or "[str" in str(kind):
            yield (*prefix, name), SHELL


def nested(field: tuple[str, ...], value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of ("a", "b")."""
    for name in reversed(field):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def test_shell_metacharacters_are_taken_literally(volumes: Volumes, pictures: Path, tmp_path: Path) -> None:
    data = tmp_path / NAME
    data.mkdir(mode=0o755)
    for picture in pictures.iterdir():
        (data / picture.name).write_bytes(picture.read_bytes())
    # What a run reads must be there; other weights are not, see below.
    places = {
        ("run", "dir"): f"/runs/{NAME}",
        ("data", "path"): f"/data/{NAME}",
        ("data", "val_path"): f"/data/{NAME}",
        ("runtime", "cache_dir"): f"/cache/{NAME}",
    }
    taken: dict[tuple[str, ...], Any] = {}
    refused = []
    for field, value in strings():
        if field == ("train", "init_from"):
            continue
        given = places.get(field, value)
        changes = [nested(*item) for item in {**taken, field: given}.items()]
        try:
            load_config(write_config(tmp_path / "probe.yaml", *changes))
            taken[field] = given
        except UserError:
            refused.append((field, given))
    assert set(places) < set(taken)
    assert ("metrics", "host") in taken
    assert len(taken) > 15
    assert ("run", "name") in [field for field, _ in refused]

    file = write_config(tmp_path / "odd $(id) ;.yaml", *[nested(*item) for item in taken.items()])
    mounts = [f"--volume={tmp_path}:/data:ro", volumes("/runs"), volumes("/cache")]
    answer = run("--config", f"/data/{file.name}", "--set", f"run.dir=/runs/{NAME}", options=mounts)
    assert answer.returncode == EXIT_FINISHED, answer.stderr
    assert f"{SHELL}:9400 cannot be used" in answer.stderr
    assert [path.name for path in volumes.path("/runs").iterdir()] == [NAME]
    assert [path.name for path in volumes.path("/cache").iterdir()] == [NAME]
    written = load_config(volumes.path("/runs") / NAME / "run.yaml")
    for field, value in taken.items():
        found: Any = written
        for name in field:
            found = getattr(found, name)
        assert (list(found) if isinstance(found, tuple) else str(found) if isinstance(found, Path) else found) == value

    # Strings that are not free are refused, each by its name.
    for index, (field, value) in enumerate(refused):
        write_config(tmp_path / f"{index}.yaml", nested(field, value))
    options = [*mounts, "--no-healthcheck", "--entrypoint", "sleep"]
    with Container("600", options=options) as container:
        wait_for(lambda: container.state()["Running"])
        for index, (field, _) in enumerate(refused):
            code, errors = container.call("hiera-train-container", "--config", f"/data/{index}.yaml")
            assert code == EXIT_CONFIG, (field, errors)
            assert ".".join(field) in errors
            assert "Traceback" not in errors
        missing = f"train.init_from={SHELL}"
        code, errors = container.call("hiera-train-container", "--config", "quickstart", "--set", missing)
        assert code == EXIT_CONFIG, errors
        assert f"{SHELL} does not exist" in errors
    assert [path.name for path in volumes.path("/runs").iterdir()] == [NAME]
