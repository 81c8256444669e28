"""PyTorch Lightning: static input buffers for a captured or compiled MAE step.

Imported only when its names are asked for; it needs lightning (or pytorch-lightning) 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hiera_optim.masks import MAEStepInputs, unwrap
from hiera_optim.recognize import why_not_hiera

if TYPE_CHECKING:
    Callback = Any
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback


class MAEStaticInputsCallback(Callback):  # type: ignore[misc]
    """Owns the `MAEStepInputs` of a LightningModule and draws a new mask before every training batch.

    Attaches `_mae_inputs` and `_batch_key` to the module when fitting starts; its training_step copies the
    batch with `feed_batch` and passes `inputs.x`, `inputs.mask` and `inputs.keep_idx` to the model. The Hiera
    is the module's `model` attribute, or else its only Hiera, under any torch.compile and DDP wrappers.

    batch_size: samples a device and step; in_chans, input_size, mask_ratio: the model's; dtype: the buffer's;
    batch_key: the input's key where batches are dicts; refresh_mask_every_step: False keeps one mask for the
    whole run. Raises TypeError at the start of fitting if the module holds no Hiera, and ValueError for sizes
    that are not the model's.
    """

    def __init__(
        self,
        batch_size: int,
        in_chans: int,
        input_size: Sequence[int],
        mask_ratio: float,
        dtype: torch.dtype = torch.bfloat16,
        batch_key: str | None = None,
        refresh_mask_every_step: bool = True,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.in_chans = in_chans
        self.input_size = tuple(input_size)
        self.mask_ratio = mask_ratio
        self.dtype = dtype
        self.batch_key = batch_key
        self.refresh_mask_every_step = refresh_mask_every_step
        self.inputs: MAEStepInputs | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the buffers on the module's device."""
        if stage != "fit":
            return
        # The strategy moves the module after this hook on some versions; root_device is final already.
        device = trainer.strategy.root_device
        self.inputs = MAEStepInputs(
            find_hiera(pl_module),
            batch_size=self.batch_size,
            in_chans=self.in_chans,
            input_size=self.input_size,
            mask_ratio=self.mask_ratio,
            device=device,
            dtype=self.dtype,
        )
        pl_module._mae_inputs = self.inputs
        pl_module._batch_key = self.batch_key

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Draw this batch's mask, outside of the compiled region."""
        if self.refresh_mask_every_step and self.inputs is not None:
            self.inputs.refresh_mask()


def find_hiera(module: nn.Module) -> nn.Module:
    """The Hiera of a LightningModule: its `model`, or its only one. Raises TypeError for none or several."""
    model = getattr(module, "model", None)
    if isinstance(model, nn.Module):
        inner: nn.Module = unwrap(model)
        if why_not_hiera(inner) is None:
            return inner
    found = [child for child in module.modules() if why_not_hiera(child) is None]
    if len(found) != 1:
        raise TypeError(f"{type(module).__name__} holds {len(found)} Hiera models: name the one to train `model`")
    return found[0]


def feed_batch(inputs: MAEStepInputs, batch: Any, batch_key: str | None = None) -> None:
    """Copy a batch into `inputs.x`, converted to its dtype, and draw a new mask.

    batch: a tensor [B, in_chans, *input_size], a tuple or list whose first item it is, or a dict with it
    under batch_key (default: the first key). Raises ValueError for another shape: drop the last batch.
    """
    x: Any = batch
    if isinstance(batch, Mapping):
        key = batch_key if batch_key is not None else next(iter(batch))
        if key not in batch:
            raise ValueError(f"batch has no key {key!r}; it has {', '.join(map(repr, batch))}")
        x = batch[key]
    elif isinstance(batch, tuple | list):
        x = batch[0]
    if not isinstance(x, Tensor) or x.shape != inputs.x.shape:
        found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"batch is {found}, but the buffer is {list(inputs.x.shape)}: use drop_last=True in the loader"
        )
    inputs.x.copy_(x, non_blocking=True)
    inputs.refresh_mask()
