"""The shipped configurations: valid, documented, and of exactly FAIR's models."""

from __future__ import annotations

import re

import pytest

from service.config.geometry import parameter_count
from service.config.load import load_config
from service.config.schema import ModelSection
from service.config.shipped import shipped_configs

FAIR = {
    "tiny": "mae_hiera_tiny_224",
    "small": "mae_hiera_small_224",
    "base": "mae_hiera_base_224",
    "base-plus": "mae_hiera_base_plus_224",
    "large": "mae_hiera_large_224",
    "huge": "mae_hiera_huge_224",
    "video-16x224": "mae_hiera_base_16x224",
}


@pytest.fixture(scope="module")
def on_meta():
    """A context in which modules are built without memory; `linspace` stays real, FAIR reads its values."""
    import contextlib

    torch = pytest.importorskip("torch")
    from torch.overrides import TorchFunctionMode

    class RealLinspace(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func is torch.linspace:
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def context():
        with torch.device("meta"), RealLinspace():
            yield

    return context


def shapes(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_the_shipped_set():
    assert set(shipped_configs()) == {*FAIR, "quickstart", "eeg-1d"}


@pytest.mark.parametrize("name", shipped_configs())
def test_it_is_valid_and_says_where_its_values_come_from(name):
    load_config(name)
    text = shipped_configs()[name].read_text()
    assert text.startswith("#")
    assert name in FAIR or name == "quickstart" or "no published" in text
    if name in FAIR and "extends" not in text:
        assert "2306.00989" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "constructor"), FAIR.items())
def test_it_is_fairs_own_model(name, constructor, on_meta):
    from hiera import hiera_mae

    section = load_config(name).model
    with on_meta():
        ours = hiera_mae.MaskedAutoencoderHiera(**section.hiera_arguments())
        fairs = getattr(hiera_mae, constructor)()
    assert shapes(ours) == shapes(fairs)
    assert parameter_count(section) == sum(parameter.numel() for parameter in fairs.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["eeg-1d", "quickstart"])
@pytest.mark.parametrize("q_pool", [0, 1, 2])
def test_parameters_are_counted_without_torch(name, q_pool, on_meta):
    from hiera.hiera_mae import MaskedAutoencoderHiera

    section = load_config(name, [f"model.q_pool={q_pool}", "model.mlp_ratio=2.5"]).model
    with on_meta():
        model = MaskedAutoencoderHiera(**section.hiera_arguments())
    assert parameter_count(section) == sum(parameter.numel() for parameter in model.parameters())


def test_defaults_of_the_schema_are_base():
    assert ModelSection() == load_config("base").model
    base, default = load_config("base"), load_config(None)
    assert base.model_copy(update={"run": default.run}) == default


@pytest.mark.parametrize("name", ["tiny", "small", "base-plus", "large", "huge"])
def test_the_sizes_change_the_model_only(name):
    config, base = load_config(name), load_config("base")
    assert config.model_copy(update={"run": base.run, "model": base.model}) == base
    assert re.search(r"^extends: base.yaml$", shipped_configs()[name].read_text(), re.MULTILINE)


@pytest.mark.parametrize(("name", "batch"), [("base", 4096), ("video-16x224", 512)])
def test_the_peak_learning_rate_is_the_papers_global_one(name, batch):
    config = load_config(name)
    assert config.train.global_batch == batch
    assert config.optim.peak_lr(batch) == pytest.approx(8e-4)
