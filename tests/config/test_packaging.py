"""What is installed: every package, and the shipped configurations where a wheel's code looks for them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wheel_has_every_package_and_the_configurations(tmp_path):
    # read, not imported: in this process another test may have imported the standard library's distutils
    assert int(version("setuptools").split(".")[0]) >= 77, "the dev extra installs it"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("service", "hiera_optim", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "README.md").touch()
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
        archive.extractall(tmp_path / "installed")

    code = {str(path.relative_to(ROOT)) for top in ("service", "hiera_optim") for path in (ROOT / top).rglob("*.py")}
    packaged = {name for name in code if (ROOT / name).with_name("__init__.py").exists()}
    assert packaged == code, "every folder of code is a package"
    configs = {f"service/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert found >= code | configs | {"service/py.typed", "hiera_optim/py.typed"}
    assert {name.split("/")[0] for name in found if ".dist-info" not in name} == {"service", "hiera_optim"}

    look = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r})\n"
        "from service.config.load import load_config; from service.config.shipped import shipped_directory\n"
        "print(shipped_directory(), load_config('configs/huge.yaml').run.name)"
    )
    shown = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [str(tmp_path / "installed/service/configs"), "hiera-huge"]
