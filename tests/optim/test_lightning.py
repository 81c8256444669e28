"""The Lightning callback under a real Trainer on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

pl = pytest.importorskip("lightning.pytorch")

from hiera_optim import MAEStaticInputsCallback, MAEStepInputs, feed_batch, optimize  # noqa: E402
from hiera_optim.masks import mask_from_keep  # noqa: E402

from .fair import batch_for, mae  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Signals(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(index)
        return {"label": index, "eeg_raw": torch.randn(3, 64, 64, generator=generator)}


class Pretraining(pl.LightningModule):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.model = optimize(mae(), graph_safe=True, verbose=False)
        if compiled:
            self.model = torch.compile(self.model, backend="eager", dynamic=False)
        self.seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        inputs = self._mae_inputs
        feed_batch(inputs, batch, self._batch_key)
        loss = self.model(inputs.x, mask_ratio=0.5, mask=inputs.mask, keep_idx=inputs.keep_idx)[0]
        self.seen.append((inputs.x.data_ptr(), inputs.x.clone(), inputs.mask.clone()))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: Pretraining, drop_last: bool = True, **options: object) -> MAEStaticInputsCallback:
    callback = MAEStaticInputsCallback(
        batch_size=4,
        in_chans=3,
        input_size=(64, 64),
        mask_ratio=0.5,
        dtype=torch.float32,
        batch_key="eeg_raw",
        **options,
    )
    trainer = pl.Trainer(
        callbacks=[callback],
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Signals(), batch_size=4, drop_last=drop_last))
    return callback


@pytest.mark.parametrize("compiled", [False, True])
def test_two_epochs(compiled: bool) -> None:
    torch.manual_seed(0)
    module = Pretraining(compiled)
    before = {n: p.clone() for n, p in module.named_parameters()}
    callback = fit(module)
    assert callback.inputs is module._mae_inputs
    assert isinstance(module._mae_inputs, MAEStepInputs)
    assert len(module.seen) == 4
    assert len({address for address, _, _ in module.seen}) == 1
    assert len({tuple(mask.flatten().tolist()) for _, _, mask in module.seen}) > 1
    expected = torch.stack([Signals()[i]["eeg_raw"] for i in range(4)])
    assert torch.equal(module.seen[0][1], expected)
    assert all(not torch.equal(before[n], p) for n, p in module.named_parameters() if "mask_token" in n)
    assert all(torch.isfinite(torch.tensor(module.losses)))


def test_a_partial_batch_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"batch is \[2, 3, 64, 64\].*drop_last=True"):
        fit(Pretraining(False), drop_last=False)


def test_one_mask_for_the_whole_run() -> None:
    module = Pretraining(False)
    callback = MAEStaticInputsCallback(4, 3, (64, 64), 0.5, torch.float32, refresh_mask_every_step=False)
    callback.inputs = MAEStepInputs(module.model, 4, 3, (64, 64), 0.5, "cpu")
    before = callback.inputs.mask.clone()
    for _ in range(10):
        callback.on_train_batch_start(None, module, None, 0)
    assert torch.equal(callback.inputs.mask, before)


def test_the_model_is_found_by_another_name_and_not_guessed() -> None:
    from hiera_optim.lightning import find_hiera

    class Named(pl.LightningModule):
        def __init__(self, *models) -> None:
            super().__init__()
            self.networks = torch.nn.ModuleList(models)

    model = mae()
    assert find_hiera(Named(torch.compile(model))) is model
    assert find_hiera(Named(torch.nn.Linear(1, 1), torch.nn.DataParallel(model))) is model
    with pytest.raises(TypeError, match="holds 0 Hiera models"):
        find_hiera(Named())
    with pytest.raises(TypeError, match="holds 2 Hiera models"):
        find_hiera(Named(mae(), mae()))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, 1), lambda x: [x], lambda x: {"x": x, "y": 0}])
def test_feed_batch_takes_tensors_tuples_and_dicts(wrap) -> None:
    model = mae()
    inputs = MAEStepInputs(model, 2, 3, (64, 64), 0.5, "cpu", dtype=torch.bfloat16)
    x = batch_for(model)
    feed_batch(inputs, wrap(x))
    assert torch.equal(inputs.x, x.bfloat16())
    assert torch.equal(mask_from_keep(inputs.keep_idx, 4), inputs.mask)
    with pytest.raises(ValueError, match="no key 'z'"):
        feed_batch(inputs, {"x": x}, "z")
