"""The sections: descriptions, defaults, immutability, path expansion and each field's own bounds."""

# Messages are compared whole.

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from service.config.load import known_fields, load_config
from service.config.schema import DataSection, ModelSection, OptimSection, RunConfig, RunSection, TrainSection
from service.config.wording import expected, resolve
from service.errors import UserError


@pytest.mark.parametrize("dotted", known_fields())
def test_every_field_has_a_description_that_is_a_sentence(dotted):
    description = resolve(dotted).get("description", "")
    assert len(description) > 10
    assert description.endswith(".")


def test_every_section_has_a_description():
    schema = RunConfig.model_json_schema()
    for name, section in schema["properties"].items():
        described = section.get("description") or schema["$defs"][section["$ref"].rsplit("/", 1)[-1]]["description"]
        assert described.endswith("."), name
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("dotted", known_fields())
def test_every_field_can_say_what_it_expects(dotted):
    assert len(expected(dotted)) > 3


def test_every_number_is_bounded():
    """A number that nobody thought about is a number that accepts -1."""
    bounds = {"minimum", "exclusiveMinimum"}
    signed = {"data.mean"}
    for dotted in set(known_fields()) - signed:
        for option in resolve(dotted).get("anyOf", [resolve(dotted)]):
            kinds = [option, option.get("items", {}), *option.get("prefixItems", [])]
            for kind in kinds:
                if kind.get("type") in ("integer", "number"):
                    assert bounds & set(kind), dotted


def test_sections_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().train.global_batch = 8


def test_run_directory_defaults_to_the_name():
    assert RunSection(name="a").directory == Path("runs/a")
    assert RunSection(name="a", dir=Path("/b")).directory == Path("/b")


def test_peak_learning_rate():
    assert OptimSection().peak_lr(4096) == pytest.approx(8e-4)
    assert OptimSection(lr=1e-3).peak_lr(4096) == 1e-3


def test_hiera_arguments_are_all_fields_but_the_mask_ratio():
    arguments = ModelSection().hiera_arguments()
    assert set(arguments) == set(ModelSection.model_fields) - {"mask_ratio"}
    assert arguments["q_stride"] == (2, 2)


def test_paths_expand_home_and_variables_once(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/big/$HOME")
    assert DataSection(path="~/pictures").path == Path("/home/me/pictures")
    assert DataSection(path="${DATA}/$DATA").path == Path("/big/$HOME/" + "/big/$HOME")
    assert DataSection(path="/a/~b").path == Path("/a/~b")


def test_only_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("X", "large-batch")
    with pytest.raises(ValidationError, match="not a preset"):
        load_like(runtime={"allocator": "$X"})


def load_like(**sections):
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=x", "train.steps: 'x' is not a whole number above 0, or null"),
        ("train.steps=2.5", "train.steps: 2.5 is not a whole number above 0, or null"),
        ("train.steps=0", "train.steps: 0 is not a whole number above 0, or null"),
        ("train.global_batch=true", "train.global_batch: true is not a whole number above 0"),
        ("train.global_batch='12'", "train.global_batch: \"'12'\" is not a whole number above 0"),
        ("train.capture=maybe", "train.capture: 'maybe' is not one of auto, on, off"),
        (
            "train.activation_checkpointing=some",
            "train.activation_checkpointing: ['some'] is not a list of whole numbers each at least 0, all, or null",
        ),
        ("train.epochs=null", "train.epochs: null although steps is null too; set one of them"),
        ("model.mask_ratio=1", "model.mask_ratio: 1 is not a number above 0 and below 1"),
        ("model.mask_ratio=0", "model.mask_ratio: 0 is not a number above 0 and below 1"),
        (
            "model.input_size=0,224",
            "model.input_size: [0, 224] is not a list of 1 to 3 whole numbers each above 0",
        ),
        (
            "model.input_size=1,2,3,4",
            "model.input_size: [1, 2, 3, 4] is not a list of 1 to 3 whole numbers each above 0",
        ),
        (
            "model.input_size=null",
            "model.input_size: [None] is not a list of 1 to 3 whole numbers each above 0",
        ),
        ("optim.base_lr=.nan", "optim.base_lr: nan is not a number above 0"),
        ("optim.base_lr=.inf", "optim.base_lr: inf is not a number above 0"),
        ("optim.betas=0.9", "optim.betas: [0.9] is not a list of 2 numbers each at least 0 and below 1"),
        ("data.flip=1", "data.flip: 1 is not true or false"),
        (
            "data.crop_scale=0.9,0.1",
            "data.crop_scale: [0.9, 0.1] is not a range; the smaller share comes first",
        ),
        ("data.mean=null", "data.mean: null although std is set; set both or neither"),
        ("data.std=null", "data.std: null although mean is set; set both or neither"),
        ("data.path=", "data.path: an empty path; use null for none"),
        ("data.path=$HIERA_NO_SUCH/x", "data.path: environment variable $HIERA_NO_SUCH is not set or empty"),
        ("data.path=~no-such-user/x", "data.path: ~no-such-user: no such home directory; give the full path"),
        ("run.name=a/b", "run.name: 'a/b' is not a name of letters, digits, '.', '_' and '-'"),
        ("run.seed=-1", f"run.seed: -1 is not a whole number at least 0 and below {2**63}"),
        (
            "runtime.collective_timeout_seconds=1e300",
            "runtime.collective_timeout_seconds: 1e+300 is not a number above 0 and at most 604800.0",
        ),
        ("checkpoint.keep=1", "checkpoint.keep: 1 is not a whole number at least 2"),
        ("metrics.port=99999", "metrics.port: 99999 is not a whole number at least 0 and at most 65535"),
        ("runtime.nproc_per_node=0", "runtime.nproc_per_node: 0 is not a whole number above 0, or auto"),
        (
            "runtime.allocator=captured-dp",
            "runtime.allocator: 'captured-dp' is not a preset (default, large-batch, captured-ddp, debug); "
            "did you mean captured-ddp?",
        ),
    ],
)
def test_a_wrong_value_is_one_line_that_names_field_value_and_expectation(override, message):
    with pytest.raises(UserError) as error:
        load_config(None, [override])
    assert str(error.value) == message


def test_every_section_refuses_unknown_keys_also_from_python():
    for section in RunConfig.model_fields.values():
        with pytest.raises(ValidationError, match="Extra inputs"):
            section.annotation(no_such_field=1)


def test_length_needs_epochs_or_steps():
    assert TrainSection(epochs=None, steps=3).steps == 3
    with pytest.raises(ValidationError, match="epochs: null"):
        TrainSection(epochs=None)
