"""YAML, extends, lookup and overrides: what they mean, and the exact line for each way to get them wrong."""

# Messages are compared whole.
# ruff: noqa: E501

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from service.config import yamlfile
from service.config.load import dump_config, known_fields, load_config, unknown_key
from service.config.schema import RunConfig
from service.config.shipped import find_config, shipped_configs
from service.errors import EXIT_CONFIG, UserError


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "x.yaml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return _write


def message(source, *overrides) -> str:
    with pytest.raises(UserError) as error:
        load_config(source, overrides)
    assert error.value.exit_code == EXIT_CONFIG
    assert str(error.value).count("\n") <= 1
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8e-4", 8e-4),
        ("1E5", 1e5),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1_281_167", 1281167),
        ("010", 10),
        ("-3", -3),
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("0x10", "0x10"),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    found = yamlfile.scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_a_file_is_read_with_quoted_text_kept_as_text(write):
    config = load_config(write("run: {name: '123'}\noptim:\n  base_lr: 8e-4\ntrain: {capture: on}\nmodel:\n"))
    assert (config.run.name, config.optim.base_lr, config.train.capture) == ("123", 8e-4, "on")


def test_an_empty_file_is_the_defaults(write):
    assert load_config(write("# nothing\n")) == load_config(None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "train:\n  steps: [1, 2\n",
            "x.yaml:3: expected ',' or ']', but got '<stream end>' (while parsing a flow sequence)",
        ),
        (
            "train:\n\tsteps: 1\n",
            "x.yaml:2: found character '\\t' that cannot start any token (while scanning for the next token)",
        ),
        ("train: {steps: 1}\nrun: {}\ntrain: {}\n", "x.yaml:3: train is given twice, first on line 1"),
        ("train:\n  steps: 1\n  steps: 2\n", "x.yaml:3: train.steps is given twice, first on line 2"),
        (
            "- 1\n",
            "x.yaml: expected sections (run, model, data, optim, train, checkpoint, runtime, metrics, cluster), found a list",
        ),
        ("train: 3\n", "x.yaml:1: train: 3 is not a section of fields"),
        ("trian: {steps: 3}\n", "x.yaml:1: unknown key trian; did you mean train?"),
        (
            "model:\n  # a\n  imput_size: [224]\n",
            "x.yaml:3: unknown key model.imput_size; did you mean model.input_size?",
        ),
        ("train:\n  lr: 1\n", "x.yaml:2: unknown key train.lr; did you mean optim.lr?"),
        ("run:\n  name: 12\n", "x.yaml:2: run.name: 12 is not a name of letters, digits, '.', '_' and '-'"),
        ("train:\n  steps: '3'\n", "x.yaml:2: train.steps: '3' is not a whole number above 0, or null"),
        (
            "train:\n  steps: a\ndata:\n  threads: b\n",
            "x.yaml:4: data.threads: 'b' is not a whole number above 0 and at most 256\nalso wrong: train.steps",
        ),
        (
            "a: !!python/object:os.system x\n",
            "x.yaml:1: the tag tag:yaml.org,2002:python/object:os.system is not allowed; write plain values",
        ),
        (
            "train: {steps: !!int '3'}\n",
            "x.yaml:1: the tag tag:yaml.org,2002:int is not allowed; write plain values",
        ),
        ("run: &a\n  name: *a\n", "x.yaml:1: nested too deeply"),
        ("run: " + "[" * 3000, "x.yaml: nested too deeply"),
        (
            "run: {}\n---\nrun: {}\n",
            "x.yaml:2: but found another document (expected a single document in the stream)",
        ),
        ("? [1]\n: 2\n", "x.yaml:1: a key must be a word, not a list or a mapping"),
        (
            "run: \x00\n",
            "x.yaml: not YAML text: unacceptable character #x0000: special characters are not allowed",
        ),
    ],
)
def test_what_is_wrong_in_a_file(write, text, expected):
    assert message(write(text)) == expected


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"run: {name: \xff}\n")
    assert message(tmp_path / "x.yaml") == f"{tmp_path}/x.yaml: not a text file in UTF-8"


def test_extends_merges_sections_and_replaces_lists(write):
    write("model: {stages: [1, 1, 1, 1], mask_ratio: 0.5}\nrun: {name: base}\n", "base.yaml")
    config = load_config(write("extends: base.yaml\nmodel: {stages: [1, 2, 1, 1]}\n", "mine.yaml"))
    assert config.model.stages == (1, 2, 1, 1)
    assert config.model.mask_ratio == 0.5
    assert config.run.name == "base"


def test_extends_looks_beside_the_file_first_then_among_the_shipped(write, tmp_path):
    write("run: {name: beside}\n", "sub/base.yaml")
    assert load_config(write("extends: base\n", "sub/mine.yaml")).run.name == "beside"
    assert load_config(write("extends: base.yaml\n", "mine.yaml")).run.name == "hiera-base"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: tiny.yaml\n", "x.yaml:1: extends: tiny.yaml extends base.yaml; only one level is allowed"),
        ("\nextends: x.yaml\n", "x.yaml:2: extends: x.yaml extends itself"),
        ("extends: 3\n", "x.yaml:1: extends: 3 is not the name of a configuration file"),
        ("extends: [a]\n", "x.yaml:1: extends: ['a'] is not the name of a configuration file"),
        (
            "extends: hige\n",
            "no configuration hige: neither a file nor shipped with hiera-train; did you mean huge?",
        ),
    ],
)
def test_extends_that_cannot_be(write, text, expected):
    if "tiny" in text:
        write("extends: base.yaml\n", "tiny.yaml")
    assert message(write(text)) == expected


def test_a_mistake_in_the_extended_file_names_that_file(write):
    write("train: {steps: x}\n", "base.yaml")
    assert message(write("extends: base\n")).startswith("base.yaml:1: train.steps: 'x'")


def test_lookup_is_as_given_then_shipped(write):
    assert (
        find_config("base") == find_config("base.yaml") == find_config("configs/base.yaml") == shipped_configs()["base"]
    )
    assert find_config("video-16x224") == shipped_configs()["video-16x224"]
    write("", "base.yaml")
    assert find_config("base") == find_config("base.yaml") == Path("base.yaml")
    assert find_config("configs/base") == shipped_configs()["base"]
    Path("huge").mkdir()
    assert find_config("huge") == shipped_configs()["huge"]


@pytest.mark.parametrize("source", ["other/base.yaml", "no", "", "a" * 5000, "/etc/shadow/x"])
def test_lookup_that_finds_nothing(write, source):
    assert message(source).startswith(f"no configuration {source}: neither a file nor shipped")


def test_home_and_variables_in_the_config_path(write, tmp_path, monkeypatch):
    write("run: {name: here}\n", "d/x.yaml")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config("~/d/x").run.name == load_config("$HOME/d/x.yaml").run.name == "here"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.input_size=448,448", (448, 448)),
        ("model.input_size=[448, 448]", (448, 448)),
        ("train.activation_checkpointing=all", "all"),
        ("train.activation_checkpointing=0,1", (0, 1)),
        ("train.activation_checkpointing=2", (2,)),
        ("train.activation_checkpointing=null", None),
        ("model.sep_pos_embed=false", False),
        ("train.capture=on", "on"),
        ("run.name=123", "123"),
        ("run.name=null", "null"),
        ("run.name=true", "true"),
        ("data.path=null", None),
        ("data.path=/a=b, [c]: {d} # e 'f'", Path("/a=b, [c]: {d} # e 'f'")),
        (
            "runtime.allocator=max_split_size_mb:512,expandable_segments:True",
            "max_split_size_mb:512,expandable_segments:True",
        ),
        (
            "runtime.allocator=roundup_power2_divisions:[256:1,512:2]",
            "roundup_power2_divisions:[256:1,512:2]",
        ),
        ("runtime.nproc_per_node=2", 2),
        ("runtime.nproc_per_node=auto", "auto"),
        ("optim.base_lr=8e-4", 8e-4),
        ("optim.clip_grad_norm=1", 1.0),
        ("optim.betas= 0.9, 0.98 ", (0.9, 0.98)),
        ("train.epochs=1_000", 1000.0),
        ("cluster.slurm.partition=a b,c", "a b,c"),
        ("cluster.slurm.time=90", "90"),
        ("cluster.slurm.extra=--mail-type=END,--nice=5", ("--mail-type=END", "--nice=5")),
        ("cluster.environment=A: 'x, $y', B: \"\\n\"", {"A": "x, $y", "B": "\n"}),
        ("cluster.kubernetes.resources={cpu: '8'}", {"cpu": "8"}),
        ("cluster.kubernetes.ttl_seconds=null", None),
    ],
)
def test_overrides_are_typed_by_the_field(override, value):
    config = load_config(None, [override])
    found = functools.reduce(getattr, override.split("=")[0].split("."), config)
    assert found == value
    assert type(found) is type(value)


def test_the_last_override_wins_over_earlier_ones_and_the_file(write):
    source = write("train: {global_batch: 8}\n")
    assert load_config(source, ["train.global_batch=16", "train.global_batch=32"]).train.global_batch == 32


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.stesp=3", "--set train.stesp=3: unknown key train.stesp; did you mean train.steps?"),
        ("steps=3", "--set steps=3: unknown key steps; did you mean train.steps?"),
        ("foo", "--set foo: write section.field=value, e.g. --set train.global_batch=1024"),
        ("train=3", "--set train=3: train is a section; set one of its fields, e.g. train.global_batch"),
        (
            "qqq=1",
            "--set qqq=1: unknown key qqq; the sections are run, model, data, optim, train, checkpoint, runtime, metrics, cluster",
        ),
        (
            "a.b.c=1",
            "--set a.b.c=1: unknown key a.b.c; the sections are run, model, data, optim, train, checkpoint, runtime, metrics, cluster",
        ),
        (
            "model.stages=[1,",
            "--set model.stages=[1,:1: expected the node content, but found '<stream end>' (while parsing a flow node)",
        ),
    ],
)
def test_overrides_that_cannot_be(override, expected):
    assert message(None, override) == expected


def test_a_wrong_override_of_a_right_file_does_not_blame_the_file(write):
    assert message(write("train: {steps: 3}\n"), "train.steps=x").startswith("train.steps: 'x'")


@pytest.mark.parametrize("dotted", known_fields())
def test_a_slip_in_any_key_is_answered_with_that_key(dotted):
    section, name = dotted.rsplit(".", 1)
    slipped = name[:-1] if len(name) > 4 else name + name[-1]
    assert unknown_key(f"{section}.{slipped}") == f"unknown key {section}.{slipped}; did you mean {dotted}?"


def test_relative_paths_become_absolute_but_builtin_data_stays(write, tmp_path):
    config = load_config(None, ["data.path=pictures/../x", "run.dir=out", "data.val_path=builtin:photographs"])
    assert config.data.path == tmp_path / "x"
    assert config.run.dir == tmp_path / "out"
    assert config.data.val_path == Path("builtin:photographs")


@pytest.mark.parametrize("name", [*shipped_configs(), None])
def test_a_dumped_configuration_reads_back_equal(write, name):
    odd = [
        "run.name=1e5",
        "metrics.host=a: b # 'c'",
        "data.path=/ü/on $$x",
        "optim.eps=1e-8",
        "train.capture=off",
    ]
    config = load_config(name, odd)
    assert load_config(write(dump_config(config))) == config
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_text_that_looks_like_something_else_is_quoted(write):
    values = ["1e5", "1_000", "on", "true", "null", "~", "", "2024-01-01", "0x1", ".5", "- a", "a: b"]
    assert yamlfile.parse(yamlfile.dump(values), "x").data == values
