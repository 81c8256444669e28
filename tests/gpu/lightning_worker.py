"""One rank of a Lightning run: bf16-mixed, the callback's static inputs, DDP where there are several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hiera_optim import MAEStaticInputsCallback, feed_batch, optimize
from tests.gpu.models import fair_model


class Signals(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        # smooth, so that there is something to learn
        coarse = torch.randn(1, 8, 8, 8, generator=generator)
        return {"eeg_raw": torch.nn.functional.interpolate(coarse, (128, 128), mode="bilinear")[0]}


class Pretraining(pl.LightningModule):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.model: Any = fair_model("small-test", (128, 128), in_chans=8)
        optimize(self.model, graph_safe=True)
        if mode != "eager":
            self.model = torch.compile(self.model, mode=mode, dynamic=False)
        self.losses: list[Tensor] = []
        self.masks: list[Tensor] = []
        self.addresses: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs: Any = self._mae_inputs
        feed_batch(inputs, batch, self._batch_key)  # type: ignore[arg-type]
        out = self.model(inputs.x, mask_ratio=0.6, mask=inputs.mask, keep_idx=inputs.keep_idx)
        loss: Tensor = out[0]
        self.losses.append(loss.detach().clone())
        self.masks.append(inputs.mask.clone())
        self.addresses.append(inputs.x.data_ptr())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(folder: Path, mode: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    module = Pretraining(mode)
    callback = MAEStaticInputsCallback(
        batch_size=4, in_chans=8, input_size=(128, 128), mask_ratio=0.6, dtype=torch.bfloat16, batch_key="eeg_raw"
    )
    trainer = pl.Trainer(
        callbacks=[callback],
        strategy=DDPStrategy(static_graph=True) if world > 1 else "auto",
        precision="bf16-mixed",
        accelerator="gpu",
        devices=world,
        max_steps=16,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(rank)
    trainer.fit(module, DataLoader(Signals(), batch_size=4, drop_last=True))
    result = {
        "losses": torch.stack(module.losses).float().cpu(),
        "masks": torch.stack(module.masks).cpu(),
        "addresses": torch.tensor(module.addresses),
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]).cpu(),
    }
    torch.save(result, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
