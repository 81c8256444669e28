"""`hiera-train reconstruct RUN_DIR`: from a run directory to a picture."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from service.config.load import dump_config
from service.config.schema import DataSection, ModelSection, RunConfig, RunSection
from service.errors import UserError
from service.train.checkpoint import checkpoint_path, write_checkpoint
from service.train.model import build_fair_model
from service.train.reconstruct import main

MODEL_2D = ModelSection(
    input_size=(32, 32),
    embed_dim=8,
    stages=(1, 1, 1),
    mask_unit_size=(4, 4),
    mask_unit_attn=(True, True, False),
    q_pool=1,
    decoder_embed_dim=8,
    decoder_depth=1,
    decoder_num_heads=2,
)
MODEL_1D = MODEL_2D.model_copy(
    update={
        "input_size": (128,),
        "in_chans": 5,
        "q_stride": (2,),
        "mask_unit_size": (4,),
        "patch_kernel": (7,),
        "patch_stride": (4,),
        "patch_padding": (3,),
    }
)


def make_run(tmp_path: Path, model: ModelSection, data: DataSection) -> Path:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    config = RunConfig(run=RunSection(dir=run_dir), model=model, data=data)
    (run_dir / "run.yaml").write_text(dump_config(config))
    for step in (3, 8):
        weights = build_fair_model(model, seed=step).state_dict()
        tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
        write_checkpoint(checkpoint_path(run_dir / "checkpoints", step), tensors, {"format": 1, "step": step})
    return run_dir


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(4):
        noise = np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i}.png")
    return folder


def test_pictures(tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path, MODEL_2D, DataSection(path=pictures, val_path=pictures))
    assert main(run_dir) == 0
    path = run_dir / "reconstructions" / "step-00000008.png"
    assert capsys.readouterr().out.strip() == str(path)
    with Image.open(path) as picture:
        assert picture.size == (3 * 192 + 8, 18 + 4 * 196 - 4)
    assert main(run_dir, step=3) == 0
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == ["step-00000003.png", "step-00000008.png"]


def test_signals_without_validation_data(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 5, 128)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    data = DataSection(kind="array", path=tmp_path / "x.npy", val_fraction=0, mean=None, std=None)
    run_dir = make_run(tmp_path, MODEL_1D, data)
    assert main(run_dir) == 0
    with Image.open(run_dir / "reconstructions" / "step-00000008.png") as picture:
        assert picture.height == 18 + 3 * (5 * 44 + 4) - 4


def test_the_data_is_gone(tmp_path: Path, pictures: Path) -> None:
    run_dir = make_run(tmp_path, MODEL_2D, DataSection(path=pictures))
    shutil.rmtree(pictures)
    with pytest.raises(UserError, match=r"data\.path: .* does not exist"):
        main(run_dir)
    assert not (run_dir / "reconstructions").exists()


def test_a_checkpoint_of_another_model(tmp_path: Path, pictures: Path) -> None:
    run_dir = make_run(tmp_path, MODEL_2D, DataSection(path=pictures))
    path = checkpoint_path(run_dir / "checkpoints", 9)
    write_checkpoint(path, {"model.mask_token": torch.zeros(1, 1, 9)}, {"format": 1, "step": 9})
    with pytest.raises(UserError, match="checkpoint of another model"):
        main(run_dir)


def test_no_checkpoint_yet(tmp_path: Path, pictures: Path) -> None:
    run_dir = make_run(tmp_path, MODEL_2D, DataSection(path=pictures))
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        main(run_dir)
