"""Exported weights load strictly into FAIR's own classes, through FAIR's own loader."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from service.errors import UserError
from service.train import export
from service.train.checkpoint import checkpoint_path, write_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    from hiera.hiera import Hiera
    from hiera.hiera_mae import MaskedAutoencoderHiera
    from hiera.hiera_utils import pretrained_model

TINY: dict[str, Any] = {
    "input_size": (32, 32),
    "embed_dim": 8,
    "stages": (1, 1, 1),
    "mask_unit_size": (4, 4),
    "mask_unit_attn": (True, True, False),
    "q_pool": 1,
}
DECODER = {"decoder_embed_dim": 8, "decoder_depth": 1, "decoder_num_heads": 2}


def make_model(seed: int, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    return MaskedAutoencoderHiera(**TINY, **DECODER, **arguments)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with checkpoints of two models, after steps 5 and 9."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (5, 9):
        tensors = {f"model.{name}": t for name, t in make_model(step).state_dict().items()}
        tensors["optim.step"] = torch.tensor(step)
        write_checkpoint(checkpoint_path(folder, step), tensors, {"format": 1, "step": step})
    return tmp_path / "run"


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_pth_goes_through_fairs_loader(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = tmp_path / "fair.pth"
    assert export.main(run_dir, to) == 0
    content = torch.load(to, weights_only=True)
    assert list(content) == ["model_state"]
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda url, **_: torch.load(url, weights_only=True))
    load = pretrained_model({"ours": str(to)}, default="ours")
    assert same(load(lambda **k: make_model(0, **k))(pretrained=True).state_dict(), make_model(9).state_dict())
    # An encoder takes its part: everything but what belongs to the decoder and its own head.
    encoder = load(lambda **k: Hiera(**TINY, **k))(pretrained=True).state_dict()
    whole = make_model(9).state_dict()
    missing = {name for name in encoder if name not in whole}
    assert {name.split(".")[0] for name in missing} == {"norm", "head"}
    assert all(torch.equal(encoder[name], whole[name]) for name in encoder.keys() - missing)


def test_safetensors_loads_strictly(run_dir: Path, tmp_path: Path) -> None:
    to = tmp_path / "model.safetensors"
    export.main(run_dir, to)
    model = make_model(0)
    model.load_state_dict(load_file(to), strict=True)
    assert same(model.state_dict(), make_model(9).state_dict())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", "run"]
    (tmp_path / "other").touch()
    assert to.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_chosen_step_replaces_the_file(run_dir: Path, tmp_path: Path) -> None:
    to = tmp_path / "model.safetensors"
    to.write_text("old")
    export.main(run_dir, to, step=5)
    assert same(load_file(to), make_model(5).state_dict())


def test_a_damaged_newest_checkpoint_is_passed_over(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoint_path(run_dir / "checkpoints", 9)
    newest.write_bytes(newest.read_bytes()[:-8])
    export.main(run_dir, tmp_path / "a.safetensors")
    assert same(load_file(tmp_path / "a.safetensors"), make_model(5).state_dict())
    assert newest.name in capsys.readouterr().err
    assert newest.exists()
    with pytest.raises(UserError, match="cannot be used"):
        export.main(run_dir, tmp_path / "b.safetensors", step=9)
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "step", "message"),
    [
        ("weights.bin", None, r"must end in \.pth or \.safetensors"),
        ("weights", None, "must end in"),
        ("a.pth", 7, r"--step 7: no such checkpoint .*there are: 5, 9"),
        ("none/a.pth", None, "cannot write"),
        ("none/a.safetensors", None, "cannot write"),
    ],
)
def test_refusals(run_dir: Path, tmp_path: Path, name: str, step: int | None, message: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message) as caught:
        export.main(run_dir, tmp_path / name, step)
    assert len(str(caught.value).splitlines()) <= 2
    assert sorted(tmp_path.rglob("*")) == before


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint yet"):
        export.main(tmp_path, tmp_path / "a.pth")
