"""optimize() and restore(): the exchange itself, recognition, overrides, weights."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from hiera_optim import (
    HieraAdapter,
    MaskUnitAttentionFast,
    auto_detect,
    clean_state_dict,
    get_hiera_adapter,
    load_weights,
    optimize,
    restore,
    state_dict_mismatches,
)
from hiera_optim.mae import mae_forward

from .fair import (
    DECODER,
    assert_equal_runs,
    batch_for,
    classifier,
    distance,
    fast,
    hiera,
    mae,
    model_arguments,
    run,
)


def test_in_place_idempotent_and_undone() -> None:
    model = mae()
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    assert optimize(model, verbose=False) is model
    quick = type(model)
    assert isinstance(model, hiera.MaskedAutoencoderHiera)
    assert quick.__name__ == "MaskedAutoencoderHiera"
    assert quick.forward is mae_forward
    assert optimize(model, sdpa_backend="math", verbose=False) is model
    assert type(model) is quick
    assert model._hiera_state.encoder_backends == ("math",) * 5
    assert list(model.state_dict()) == keys
    assert all(parameters[n] is p for n, p in model.named_parameters())
    assert not list(model.buffers())
    before = set(vars(mae()))
    assert restore(model) is model
    assert type(model) is hiera.MaskedAutoencoderHiera
    assert set(vars(model)) == before
    restore(model)


def test_fairs_classes_are_never_patched() -> None:
    names = ("Hiera", "MaskedAutoencoderHiera", "HieraBlock", "MaskUnitAttention", "PatchEmbed")
    before = {name: dict(vars(getattr(hiera, name))) for name in names}
    model = fast(mae())
    fast(classifier(mask_unit_size=(4, 4), q_pool=3))
    run(model, batch_for(model))
    assert {name: dict(vars(getattr(hiera, name))) for name in names} == before


def test_one_line_says_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    optimize(mae())
    assert capsys.readouterr().out == "hiera_optim: MaskedAutoencoderHiera: window-major fast path, 7 blocks\n"
    optimize(mae(), verbose=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "options",
    [{"graph_safe": True}, {"fused_block": True}, {"fused_mlp": True}, {"swap_attention": False}],
)
def test_published_options_are_accepted_and_change_no_number(options: dict[str, bool]) -> None:
    model = mae()
    x = batch_for(model)
    assert_equal_runs(run(fast(model, **options), x), run(model, x))


def test_swap_gather_false_keeps_fairs_forward_with_fast_attention() -> None:
    model = mae()
    quick = fast(model, swap_gather=False)
    assert type(quick) is hiera.MaskedAutoencoderHiera
    assert all(isinstance(b.attn, MaskUnitAttentionFast) for b in [*quick.blocks, *quick.decoder_blocks])
    x = batch_for(model)
    assert_equal_runs(run(quick, x), run(model, x))
    restore(quick)
    assert type(quick.blocks[0].attn) is hiera.MaskUnitAttention
    assert "sdpa_backend" not in vars(quick.blocks[0].attn)


@pytest.mark.parametrize("move", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_are_optimised_and_independent(move) -> None:
    model = fast(mae(), sdpa_backend="math")
    other = move(model)
    assert type(other) is type(model)
    x = batch_for(model)
    assert torch.equal(run(other, x).loss, run(model, x).loss)
    with torch.no_grad():
        other.decoder_pred.bias.add_(1)
    assert not torch.equal(run(other, x).loss, run(model, x).loss)
    assert type(restore(other)) is hiera.MaskedAutoencoderHiera
    assert type(model) is not hiera.MaskedAutoencoderHiera
    attention = fast(mae(), swap_gather=False)
    assert isinstance(move(attention).blocks[0].attn, MaskUnitAttentionFast)


def test_state_dicts_go_both_ways(tmp_path: Path) -> None:
    model, quick = mae(), fast(mae(drop_path_rate=0.0))
    quick.load_state_dict(model.state_dict(), strict=True)
    torch.save(quick.state_dict(), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    mae().load_state_dict(loaded, strict=True)
    assert model.no_weight_decay() == quick.no_weight_decay()


NOT_HIERA = {
    "a linear": (lambda: nn.Linear(2, 2), "Linear is not FAIR's Hiera"),
    "a number": (lambda: 3, "int is not a torch.nn.Module"),
    "a namesake": (lambda: type("Hiera", (nn.Module,), {})(), "it has no blocks"),
    "a compiled model": (lambda: torch.compile(mae()), "OptimizedModule wraps a model"),
    "a wrapped model": (lambda: nn.DataParallel(mae()), "DataParallel wraps a model"),
}


@pytest.mark.parametrize("case", NOT_HIERA)
def test_other_models_are_refused_in_one_line(case: str) -> None:
    build, message = NOT_HIERA[case]
    with pytest.raises(TypeError, match=message) as raised:
        optimize(build())
    assert "\n" not in str(raised.value)


def test_timms_hiera_is_not_fairs() -> None:
    timm_hiera = pytest.importorskip("timm.models.hiera")
    with pytest.raises(TypeError, match="not FAIR's Hiera"):
        optimize(timm_hiera.Hiera(img_size=(64, 64), embed_dim=8, stages=(1, 1, 1, 1)))


def test_unknown_backend_leaves_the_model_as_it_was() -> None:
    model = mae()
    with pytest.raises(ValueError, match="unknown sdpa_backend 'xformers'"):
        optimize(model, sdpa_backend="xformers", verbose=False)
    with pytest.raises(ValueError, match="unknown sdpa_backend 'triton'"):
        optimize(model, sdpa_backend=lambda i, block: "triton", verbose=False)
    assert type(model) is hiera.MaskedAutoencoderHiera


@pytest.fixture(scope="module")
def in_tree() -> ModuleType:
    """FAIR's sources as a copy in someone's repository: models/hiera.py and the files beside it."""
    from hiera_optim import compat

    folder = Path(hiera.__file__).parent
    sys.modules["models"] = package = ModuleType("models")
    package.__path__ = [str(folder)]
    try:
        with compat._lent_modules():
            for name in ("hiera_utils", "hfhub", "hiera", "hiera_mae"):
                spec = importlib.util.spec_from_file_location(f"models.{name}", folder / f"{name}.py")
                module = importlib.util.module_from_spec(spec)
                sys.modules[f"models.{name}"] = module
                spec.loader.exec_module(module)
        yield sys.modules["models.hiera_mae"]
    finally:
        for name in [n for n in sys.modules if n == "models" or n.startswith("models.")]:
            del sys.modules[name]


def test_an_in_tree_copy_is_recognised(in_tree: ModuleType) -> None:
    assert in_tree.MaskedAutoencoderHiera is not hiera.MaskedAutoencoderHiera
    torch.manual_seed(0)
    model = in_tree.MaskedAutoencoderHiera(**DECODER, **model_arguments("image"))
    x = batch_for(model)
    quick = fast(model)
    assert type(quick).forward is mae_forward
    assert_equal_runs(run(quick, x), run(model, x))
    adapter = get_hiera_adapter(model)
    assert adapter.block_class().__module__ == "models.hiera"


def test_an_in_tree_switch_for_checkpointing_is_honoured() -> None:
    model = fast(mae())
    x = batch_for(model)
    expected = run(model, x)
    model._grad_checkpointing = True
    assert_equal_runs(run(model, x), expected)


class Renamed(hiera.MaskedAutoencoderHiera):
    """Overrides nothing."""


class OtherLoss(hiera.MaskedAutoencoderHiera):
    def forward_loss(self, x, pred, mask):
        loss, pred, label = super().forward_loss(x, pred, mask)
        return 2 * loss, pred, label


class OtherLabel(hiera.MaskedAutoencoderHiera):
    def get_pixel_label_2d(self, input_img, mask, norm=True):
        return super().get_pixel_label_2d(input_img, mask, norm=False)


class OtherEncoder(hiera.MaskedAutoencoderHiera):
    def forward_encoder(self, x, mask_ratio, mask=None):
        latent, mask = super().forward_encoder(x, mask_ratio, mask=mask)
        return latent * 1.5, mask


class OtherDecoder(hiera.MaskedAutoencoderHiera):
    def forward_decoder(self, x, mask):
        pred, mask = super().forward_decoder(x, mask)
        return pred + 1, mask


class OtherForward(hiera.MaskedAutoencoderHiera):
    def forward(self, x, mask_ratio=0.6, mask=None):
        loss, *rest = super().forward(x, mask_ratio, mask)
        return loss + 1, *rest


class OtherMask(hiera.MaskedAutoencoderHiera):
    def get_random_mask(self, x, mask_ratio):
        mask = torch.zeros(x.shape[0], 4, dtype=torch.bool, device=x.device)
        mask[:, :3] = True  # another number than mask_ratio says
        return mask


class OtherPosition(hiera.MaskedAutoencoderHiera):
    def get_pos_embed(self):
        return super().get_pos_embed() * 3


OVERRIDES = [OtherLoss, OtherLabel, OtherEncoder, OtherDecoder, OtherForward, OtherMask, OtherPosition]


@pytest.mark.parametrize("cls", [Renamed, *OVERRIDES])
def test_subclasses_keep_what_they_override(cls: type) -> None:
    torch.manual_seed(0)
    model = cls(**DECODER, **model_arguments("image"))
    x = batch_for(model)
    quick = fast(model)
    assert isinstance(quick, cls)
    ours, fairs = run(quick, x), run(model, x)
    assert_equal_runs(ours, fairs)
    plain = hiera.MaskedAutoencoderHiera(**DECODER, **model_arguments("image"))
    plain.load_state_dict(model.state_dict())
    # The override matters, so keeping it is a thing that could have failed.
    if cls in (OtherLoss, OtherLabel, OtherForward):
        change = distance(run(plain, x).loss, fairs.loss)
    else:
        key = "blocks.0.attn.qkv.weight"
        change = distance(run(plain, x).gradients[key], fairs.gradients[key])
    assert (change > 1e-3) is (cls is not Renamed)
    whole = cls in (Renamed, OtherMask, OtherPosition)
    assert (type(quick).forward is mae_forward) is whole


def test_pieces_of_a_subclass_take_keep_idx_and_masks_of_their_own() -> None:
    torch.manual_seed(0)
    model = OtherEncoder(**DECODER, **model_arguments("image"))
    x = batch_for(model)
    mask = model.get_random_mask(x, 0.5)
    keep_idx = mask.nonzero()[:, 1].view(2, -1)
    assert distance(fast(model)(x, keep_idx=keep_idx)[0], model(x, mask=mask)[0]) < 1e-6


def test_a_patched_instance_keeps_its_patch() -> None:
    model = mae()
    model.forward_loss = lambda x, pred, mask: (pred.sum() * 0 + 5, pred, pred)
    assert fast(model)(batch_for(model))[0] == 5


class ScaledBlock(hiera.HieraBlock):
    def forward(self, x):
        return super().forward(x) * 0.5


class ScaledAttention(hiera.MaskUnitAttention):
    def forward(self, x):
        return super().forward(x) * 0.5


def test_blocks_of_ones_own_are_run_as_they_are() -> None:
    for part in ("block", "attention", "decoder"):
        model = mae()
        if part == "block":
            model.blocks[2].__class__ = ScaledBlock
        elif part == "attention":
            model.blocks[2].attn.__class__ = ScaledAttention
        else:
            model.decoder_blocks[0].__class__ = ScaledBlock
        x = batch_for(model)
        assert_equal_runs(run(fast(model), x), run(model, x))
        key = "blocks.2.attn.qkv.weight" if part != "decoder" else "decoder_blocks.1.attn.qkv.weight"
        assert distance(run(model, x).gradients[key], run(mae(), x).gradients[key]) > 1e-3


@pytest.mark.parametrize("name", ["image", "video", "q_pool-0", "wide-8-channels"])
def test_single_methods_keep_fairs_contract(name: str) -> None:
    model = mae(name).eval()
    quick = fast(model)
    x = batch_for(model)
    mask = model.get_random_mask(x, 0.5)
    latents = [m.forward_encoder(x, 0.5, mask=mask)[0] for m in (quick, model)]
    assert latents[0].shape == latents[1].shape
    assert distance(*latents) < 1e-5
    preds = [m.forward_decoder(latents[1], mask) for m in (quick, model)]
    assert torch.equal(preds[0][1], preds[1][1])
    assert distance(preds[0][0], preds[1][0]) < 1e-5
    uneven = ~preds[0][1]
    uneven[0, uneven[0].nonzero()[0]] = False
    for masked in (~preds[0][1], uneven):
        losses = [m.forward_loss(x, preds[1][0], masked) for m in (quick, model)]
        for ours, fairs in zip(*losses, strict=True):
            assert ours.shape == fairs.shape
            assert distance(ours, fairs) < 1e-5
    with pytest.raises(ValueError, match="latent holds"):
        quick.forward_decoder(latents[0][:, 1:], mask)


def test_weights_are_cleaned_of_wrappers_prefixes() -> None:
    model = fast(mae())
    plain = model.state_dict()
    wrapped = {f"module._orig_mod.{key}": value for key, value in plain.items()}
    assert clean_state_dict(wrapped).keys() == plain.keys()
    assert clean_state_dict({"model_state": wrapped}).keys() == plain.keys()
    assert clean_state_dict(torch.compile(model).state_dict()).keys() == plain.keys()
    target = mae(drop_path_rate=0.0)
    load_weights(torch.compile(target), nn.DataParallel(torch.compile(model)).state_dict())
    assert all(torch.equal(target.state_dict()[k], v) for k, v in plain.items())
    with pytest.raises(ValueError, match="twice"):
        clean_state_dict({**plain, "module.mask_token": plain["mask_token"]})


MISMATCHES = {
    "larger picture": ({"input_size": (128, 64)}, ["pos_embed: the model has [1, 512, 8]"]),
    "one channel": ({"in_chans": 1}, ["patch_embed.proj.weight: the model has [8, 1, 7, 7]", "decoder_pred"]),
    "deeper decoder": ({"decoder_depth": 4}, ["decoder_blocks.2.norm1.weight: missing"]),
    "shallower decoder": ({"decoder_depth": 1}, ["decoder_blocks.1.norm1.weight: not in the model"]),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_weights_that_do_not_fit_are_named_key_by_key(case: str) -> None:
    changes, messages = MISMATCHES[case]
    model = mae(**changes)
    before = copy.deepcopy(model.state_dict())
    lines = state_dict_mismatches(model, mae().state_dict())
    for message in messages:
        assert any(line.startswith(message) for line in lines)
    with pytest.raises(ValueError, match="checkpoint does not fit the model") as raised:
        load_weights(model, mae().state_dict())
    assert "\n" not in str(raised.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_adapters_describe_models() -> None:
    model = fast(mae())
    adapter = get_hiera_adapter(model)
    assert adapter.matches(model)
    assert adapter.is_mae(model)
    assert not adapter.is_mae(classifier())
    assert adapter.block_class() is hiera.HieraBlock
    assert adapter.attention_class() is hiera.MaskUnitAttention
    assert adapter.encoder_blocks(model) is model.blocks
    assert adapter.decoder_blocks(model) is model.decoder_blocks
    assert adapter.decoder_blocks(classifier()) is None
    assert adapter.stage_ends(model) == [0, 1, 3, 4]
    x = torch.randn(2, 3, 2, 2, 4)
    assert torch.equal(adapter.apply_fusion_head(nn.Identity(), x), x)
    assert adapter.undo_windowing(torch.randn(2, 4, 2, 2, 5), [4, 4], [2, 2]).shape == (2, 4, 4, 5)
    assert HieraAdapter().block_class() is hiera.HieraBlock
    assert auto_detect(nn.Linear(1, 1)) is None
    with pytest.raises(TypeError, match="not FAIR's Hiera"):
        HieraAdapter(nn.Linear(1, 1))
