"""The repository as a whole: which package imports which, sizes, nothing unpickled, documents that are true."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from service import cli, errors
from service.config.load import load_config
from service.config.schema import RunConfig
from service.config.shipped import shipped_configs
from service.metrics.names import METRICS
from service.train.model import build_fair_model

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("service", "hiera_optim")
LONGEST_FILE = 400
"""Lines of code: neither blank nor comment nor docstring."""

HEAVY = {"torch", "triton", "numpy", "hiera", "timm", "PIL", "safetensors", "hiera_optim"}
LIGHT_ROOTS = (
    "service.errors",
    "service.cli",
    "service.config",
    "service.launch",
    "service.metrics",
    "service.cluster",
)
"""What a login node runs: never imports HEAVY when imported."""


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sources(*PACKAGES)
}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# -- imports -----------------------------------------------------------------------------------------------


def statements(body: list[ast.stmt], everything: bool) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported; with `everything` also those inside functions."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse, everything)
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not everything:
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, name, []), everything)
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body, everything)


def imports(module: str, *, everything: bool) -> set[str]:
    """Full names of what a module imports: modules, and names that may be modules."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in statements(tree(path).body, everything):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            found.add(source)
            found.update(f"{source}.{alias.name}" for alias in node.names)
    return found


def with_parents(name: str) -> list[str]:
    """`a.b.c` and what Python imports before it: a, a.b, a.b.c."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def loaded_by(module: str) -> dict[str, str]:
    """Modules of ours and top-level packages of others that importing `module` loads, each with its importer."""
    reached: dict[str, str] = {}
    waiting = [(name, module) for name in with_parents(module)]
    while waiting:
        name, importer = waiting.pop()
        if name in reached:
            continue
        reached[name] = importer
        for target in imports(name, everything=False) if name in MODULES else ():
            ours = [part for part in with_parents(target) if part in MODULES]
            waiting += [(part, name) for part in ours or [target.split(".")[0]]]
    return reached


def test_packages_import_in_one_direction() -> None:
    """service -> hiera_optim -> torch, triton, hiera; and only what pyproject.toml asks for."""
    beside = {"PIL": "pillow", "yaml": "pyyaml", "hiera": "hiera-transformer", "prometheus_client": "prometheus-client"}
    project = PYPROJECT["project"]
    asked = [*project["dependencies"], *(one for group in project["optional-dependencies"].values() for one in group)]
    names = {re.split(r"[^A-Za-z0-9_-]", one, maxsplit=1)[0].lower() for one in asked}
    # timm comes with hiera-transformer; pytorch_lightning is the older name of lightning.
    allowed = names | {"service", "hiera_optim", "timm", "pytorch_lightning", *sys.stdlib_module_names}
    for module in MODULES:
        tops = {name.split(".")[0] for name in imports(module, everything=True)}
        strangers = {top for top in tops if beside.get(top, top).lower() not in allowed}
        assert not strangers, f"{module} imports {strangers}, which pyproject.toml does not name"
        if module.startswith("hiera_optim"):
            assert "service" not in tops, f"{module} imports service"


LIGHT = [module for module in MODULES if any(module == root or module.startswith(root + ".") for root in LIGHT_ROOTS)]


@pytest.mark.parametrize("module", LIGHT)
def test_a_login_node_never_imports_torch(module: str) -> None:
    reached = loaded_by(module)
    heavy = {name: importer for name, importer in reached.items() if name.split(".")[0] in HEAVY}
    assert not heavy, f"importing {module} imports " + ", ".join(f"{k} (in {v})" for k, v in heavy.items())


def test_the_import_test_sees_imports() -> None:
    """A test of the tests above: where torch is imported, they would say so."""
    assert "torch" in loaded_by("service.train.loop")
    assert "hiera_optim.masks" in loaded_by("service.train.reconstruct")
    assert "service.train.export" in imports("service.cli", everything=True)
    assert "service.train.export" not in loaded_by("service.cli")


def test_importing_hiera_optim_loads_no_model_library() -> None:
    lazy = {"hiera", "timm", "torchvision", "lightning", "pytorch_lightning", "triton"}
    assert not lazy & loaded_by("hiera_optim").keys()


# -- form --------------------------------------------------------------------------------------------------


def lines_of_code(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_says_what_it_is(path: Path) -> None:
    assert lines_of_code(path) <= LONGEST_FILE, "split it"
    if path.read_text(encoding="utf-8").strip():
        assert ast.get_docstring(tree(path)), "it has no docstring"


def test_packages_are_typed() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"][package]


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def unsafe(path: Path) -> list[str]:
    """What in a file could run code from data, as `file:line what`."""
    found = []
    for name, node in calls(path):
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "torch.load" and arguments.get("weights_only") != "True":
            found.append((node.lineno, "torch.load without weights_only=True"))
        if name in ("np.load", "numpy.load") and arguments.get("allow_pickle", "False") != "False":
            found.append((node.lineno, "numpy.load with allow_pickle"))
        if name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"):
            safe = arguments.get("Loader", "").rpartition(".")[2]
            if safe not in ("SafeLoader", "CSafeLoader"):
                found.append((node.lineno, name))
    return [f"{path.name}:{line} {what}" for line, what in sorted(found)]


def test_nothing_is_unpickled() -> None:
    for path in sources(*PACKAGES, "benchmarks", "tests"):
        assert unsafe(path) == []
    for module in MODULES:
        tops = {name.split(".")[0] for name in imports(module, everything=True)}
        assert not tops & {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}, module


def test_unsafe_loads_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "torch.load(a)\nnp.load(b, allow_pickle=True)\nyaml.load(c, Loader=yaml.Loader)\n"
        "torch.load(d, weights_only=True)\nnp.load(e)\nyaml.load(f, Loader=yaml.SafeLoader)\n"
    )
    assert [line.split(" ")[0] for line in unsafe(path)] == ["bad.py:1", "bad.py:2", "bad.py:3"]


# -- documents ---------------------------------------------------------------------------------------------

README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("monitoring/*.md")])
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path, *languages: str) -> list[str]:
    """Contents of a document's fenced blocks in these languages."""
    found = FENCE.findall(path.read_text(encoding="utf-8"))
    return [content for language, content in found if language in languages]


def commands(path: Path) -> list[list[str]]:
    """The commands of a document: lines of its bash blocks, as words, and what stands in `backticks`."""
    text = path.read_text(encoding="utf-8")
    lines = [line for block in blocks(path, "bash", "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = []
    for line in lines:
        if line.startswith(("make ", "hiera-train ", "`make ", ".venv/bin/", "TRITON_INTERPRET=")):
            words = shlex.split(line.partition(" | ")[0], comments=True)
            # "render slurm|kubernetes" and "render slurm …" are talk about commands.
            if not any("…" in word or "|" in word for word in words):
                found.append(words)
    return found


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE))
    documented = set(re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE))
    assert phony == documented, "every target is phony and has a line of help"
    targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
    assert len(targets) == len(set(targets)), "a target is there twice"
    return documented


def anchors(path: Path) -> set[str]:
    """Anchors that a document's headings get: lower case, punctuation gone, hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@documents
def test_links_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


@documents
def test_commands_of_documents_exist(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    targets = make_targets()
    for words in commands(path):
        if words[0] == "make":
            target = words[1] if len(words) > 1 else "help"
            assert target in targets, f"make {target}: no such target"
        elif words[0] == "hiera-train" and len(words) > 1 and not words[1].startswith("..."):
            check_command(words[1:])


def check_command(words: list[str]) -> None:
    """The command line is accepted, and so are the configuration and the settings it names."""
    if words[0].startswith("--"):
        words = ["run", *words]
    if len(words) == 1:
        assert words[0] in cli._COMMANDS, f"there is no command {words[0]}"
        return
    options = vars(cli._parser().parse_args(words))
    source = options.get("config") or options.get("file")
    if source in shipped_configs():
        load_config(source, options["overrides"])


def test_the_continuous_integration_calls_what_exists() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    called = set(re.findall(r"^stage \w+ make ([\w-]+)", script, re.MULTILINE))
    assert {"check", "test", "test-system"} <= called <= make_targets()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@documents
def test_yaml_of_documents_is_valid(path: Path, tmp_path: Path) -> None:
    for block in blocks(path, "yaml"):
        content = yaml.safe_load(block)
        if content.keys() <= {"extends", *RunConfig.model_fields}:
            file = tmp_path / "config.yaml"
            file.write_text(block, encoding="utf-8")
            load_config(file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/library.md"])
def test_python_of_documents_runs(name: str, tmp_path: Path) -> None:
    """All blocks in order, the README's first one before; with small inputs, and without torch.compile, which
    other tests cover."""
    parts = ["import torch", "torch.compile = lambda model, **_: model", "torch.cuda.is_available = lambda: False"]
    parts += blocks(README, "python")[:1] if name != "README.md" else []
    parts += blocks(ROOT / name, "python")
    text = "\n".join(parts).replace("224, 224", "64, 64")
    text = text.replace("_224(pretrained=False)", "_224(pretrained=False, input_size=(64, 64), decoder_depth=1)")
    text = text.replace("input_size=(384, 384))", "input_size=(96, 96), decoder_depth=1)")
    # What `hiera-train export runs/quickstart` would have written.
    quickstart = load_config("quickstart")
    weights = build_fair_model(quickstart.model, 0).state_dict()
    torch.save({"model_state": weights}, tmp_path / "hiera-quickstart.pth")
    script = tmp_path / "blocks.py"
    script.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if name == "README.md":
        assert re.search(r"^loss \d\.\d+, gradient norm \d+\.\d+$", done.stdout, re.MULTILINE), done.stdout


def test_readme_tells_the_exit_codes() -> None:
    table = set(map(int, re.findall(r"^\| (\d+) \|", README.read_text(encoding="utf-8"), re.MULTILINE)))
    assert table == {value for name, value in vars(errors).items() if name.startswith("EXIT_")}


def test_readme_names_every_shipped_configuration() -> None:
    text = README.read_text(encoding="utf-8")
    assert [name for name in shipped_configs() if f"`{name}`" not in text] == []


@documents
def test_settings_and_metrics_of_documents_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    for section, name in re.findall(r"[`\s](\w+)\.(\w+)(?=[`=])", text):
        if section in sections and name not in ("py", "yaml", "jsonl"):
            assert name in sections[section].model_fields, f"there is no setting {section}.{name}"
    known = {metric.full_name for metric in METRICS}
    for name in re.findall(r"`(hiera_[a-z_]+)`", text):
        assert name == "hiera_optim" or name in known, f"there is no metric {name}"


def test_the_changelog_is_about_this_version() -> None:
    assert PYPROJECT["project"]["version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
