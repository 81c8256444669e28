"""Every rule about sizes, batch, channels and schedule: the exact line, and FAIR's own model as the judge."""

# Messages are compared whole.
# ruff: noqa: E501

from __future__ import annotations

import pytest

from service.config.checks import BatchSplit, check_model, check_settings, check_world
from service.config.geometry import kept_mask_units, mask_unit_count
from service.config.load import load_config
from service.config.schema import ModelSection, RunConfig
from service.errors import UserError

TINY = {
    "embed_dim": 16,
    "stages": (1, 1, 1, 1),
    "decoder_embed_dim": 16,
    "decoder_depth": 1,
    "decoder_num_heads": 2,
    "mask_ratio": 0.5,
    "input_size": (64, 64),
}
VIDEO = {
    "input_size": (4, 64, 64),
    "q_stride": (1, 2, 2),
    "mask_unit_size": (1, 8, 8),
    "patch_kernel": (3, 7, 7),
    "patch_stride": (2, 4, 4),
    "patch_padding": (1, 3, 3),
}
SIGNAL = {
    "input_size": (1024,),
    "q_stride": (2,),
    "mask_unit_size": (8,),
    "patch_kernel": (31,),
    "patch_stride": (16,),
    "patch_padding": (15,),
}
ALL3 = {"stages": (1, 1, 1), "mask_unit_attn": (True, True, False)}

VALID = [
    {},
    {"input_size": (224, 448)},
    {"input_size": (128, 192), "in_chans": 13},
    {"q_pool": 0},
    {"q_pool": 1},
    {"q_pool": 3},
    {"mask_ratio": 0.75},
    {"mask_unit_attn": (False,) * 4},
    {"stages": (1,), "mask_unit_attn": (True,), "mask_unit_size": (1, 1), "q_pool": 0},
    {**ALL3, "mask_unit_size": (4, 4)},
    {**ALL3, "q_stride": (3, 3), "mask_unit_size": (9, 9), "patch_stride": (3, 3), "input_size": (54, 54)},
    {"patch_kernel": (4, 4), "patch_padding": (0, 0)},
    {"patch_kernel": (8, 8), "patch_padding": (2, 3)},
    VIDEO,
    {**VIDEO, "sep_pos_embed": True},
    {**VIDEO, "input_size": (6, 64, 64)},
    {**VIDEO, "input_size": (3, 64, 32), "patch_stride": (1, 4, 4)},
    {**VIDEO, "input_size": (32, 64, 64), "q_stride": (2, 2, 2), "mask_unit_size": (8, 8, 8), "q_pool": 0},
]
INVALID = [
    (
        {"input_size": (112, 112)},
        "model.input_size: [112, 112] does not divide by [32, 32] (patch_stride x q_stride^3); nearest valid: 112 -> 96 or 128",
    ),
    (
        {"input_size": (240, 224)},
        "model.input_size: [240, 224] does not divide by [32, 32] (patch_stride x q_stride^3); nearest valid: 240 -> 224 or 256",
    ),
    (
        {"input_size": (472, 200)},
        "model.input_size: [472, 200] does not divide by [32, 32] (patch_stride x q_stride^3); nearest valid: 472 -> 448 or 480, 200 -> 192 or 224",
    ),
    (
        {"input_size": (16, 64)},
        "model.input_size: [16, 64] does not divide by [32, 32] (patch_stride x q_stride^3); nearest valid: 16 -> 32",
    ),
    (
        {"input_size": (32, 32)},
        "model.input_size: [32, 32] is a single mask unit of [32, 32]; masked autoencoding needs at least 2",
    ),
    (
        {"mask_unit_size": (4, 4)},
        "model.mask_unit_size: [4, 4] must be q_stride^(stages - 1) = [8, 8] for masked autoencoding",
    ),
    (
        {"mask_unit_size": (16, 16)},
        "model.mask_unit_size: [16, 16] must be q_stride^(stages - 1) = [8, 8] for masked autoencoding",
    ),
    (
        {"mask_unit_size": (2, 2)},
        "model.mask_unit_size: [2, 2] must be q_stride^(stages - 1) = [8, 8] for masked autoencoding",
    ),
    (
        {"q_stride": (1, 2), "mask_unit_size": (1, 8)},
        "model.q_stride: [1, 2] with patch_stride [4, 4] predicts patches of 4 x 16; FAIR's reconstruction target must be square",
    ),
    (
        {"q_stride": (2, 1), "mask_unit_size": (8, 1)},
        "model.q_stride: [2, 1] with patch_stride [4, 4] predicts patches of 16 x 4; FAIR's reconstruction target must be square",
    ),
    (
        {"q_stride": (1, 2)},
        "model.mask_unit_size: [8, 8] must be q_stride^(stages - 1) = [1, 8] for masked autoencoding",
    ),
    ({"q_pool": 4}, "model.q_pool: 4 must be less than the number of stages, 4"),
    ({"mask_unit_attn": (True, True)}, "model.mask_unit_attn: 2 values for 4 stages; give one a stage"),
    ({"mask_unit_attn": (True,)}, "model.mask_unit_attn: 1 value for 4 stages; give one a stage"),
    (
        {"patch_padding": (1, 1)},
        "model.patch_padding: 1 with patch_kernel 7 and patch_stride 4 must be 2 to 3 (for input_size / patch_stride tokens)",
    ),
    (
        {"patch_padding": (3, 0)},
        "model.patch_padding: 0 with patch_kernel 7 and patch_stride 4 must be 2 to 3 (for input_size / patch_stride tokens)",
    ),
    (
        {"patch_padding": (4, 4)},
        "model.patch_padding: 4 with patch_kernel 7 and patch_stride 4 must be 2 to 3 (for input_size / patch_stride tokens)",
    ),
    (
        {"patch_kernel": (4, 4), "patch_padding": (2, 2)},
        "model.patch_padding: 2 with patch_kernel 4 and patch_stride 4 must be 0 to 1 (for input_size / patch_stride tokens)",
    ),
    (
        {"patch_stride": (1, 1), "patch_kernel": (2, 2), "patch_padding": (0, 0)},
        "model.patch_padding: 0 with patch_kernel 2 and patch_stride 1 has no valid padding; give another patch_kernel (for input_size / patch_stride tokens)",
    ),
    (
        {"embed_dim": 20, "num_heads": 3},
        "model.embed_dim: 20 does not divide by model.num_heads 3; nearest valid: 18 or 21",
    ),
    (
        {"decoder_num_heads": 32},
        "model.decoder_embed_dim: 16 does not divide by model.decoder_num_heads 32; nearest valid: 32",
    ),
    (
        {"mask_ratio": 0.8},
        "model.mask_ratio: 0.8 keeps 0 of 4 mask units; at least 1 must be kept, so 0.75 at most",
    ),
    (
        {"mask_ratio": 0.9, "input_size": (320, 32)},
        "model.mask_ratio: 0.9 keeps 0 of 10 mask units; at least 1 must be kept, so 0.899 at most",
    ),
    ({"mask_ratio": 1e-20}, "model.mask_ratio: 1e-20 hides none of 4 mask units; raise it"),
    ({"sep_pos_embed": True}, "model.sep_pos_embed: true needs 3-D input, model.input_size is 2-D"),
    (
        {"q_stride": (2, 2, 2)},
        "model.q_stride: [2, 2, 2] has 3 values but model.input_size [64, 64] has 2 dimensions",
    ),
    ({"input_size": (64,)}, "model.q_stride: [2, 2] has 2 values but model.input_size [64] has 1 dimension"),
    (
        {"mask_unit_size": (8,)},
        "model.mask_unit_size: [8] has 1 value but model.input_size [64, 64] has 2 dimensions",
    ),
    (
        {"patch_kernel": (7, 7, 7)},
        "model.patch_kernel: [7, 7, 7] has 3 values but model.input_size [64, 64] has 2 dimensions",
    ),
    (
        {**VIDEO, "input_size": (15, 64, 64)},
        "model.input_size: [15, 64, 64] does not divide by [2, 32, 32] (patch_stride x q_stride^3); nearest valid: 15 -> 14 or 16",
    ),
    (
        {**VIDEO, "input_size": (1, 64, 64)},
        "model.input_size: [1, 64, 64] does not divide by [2, 32, 32] (patch_stride x q_stride^3); nearest valid: 1 -> 2",
    ),
    (
        {**VIDEO, "input_size": (32, 64, 64), "q_stride": (2, 2, 2), "mask_unit_size": (8, 8, 8)},
        "model.q_stride: [2, 2, 2] pools over time, which FAIR's reconstruction target cannot; use [1, 2, 2] with mask_unit_size [1, 8, 8]",
    ),
    (
        {**SIGNAL, "input_size": (1000,)},
        "model.input_size: [1000] does not divide by [128] (patch_stride x q_stride^3); nearest valid: 1000 -> 896 or 1024",
    ),
]


def section(changes) -> ModelSection:
    return ModelSection(**{**TINY, **changes})


def fair_runs(model: ModelSection) -> bool:
    """Whether FAIR's model can be built and gives a finite loss."""
    torch = pytest.importorskip("torch")
    from hiera.hiera_mae import MaskedAutoencoderHiera

    try:
        net = MaskedAutoencoderHiera(**model.hiera_arguments())
        with torch.no_grad():
            loss, *_ = net(torch.randn(2, model.in_chans, *model.input_size), mask_ratio=model.mask_ratio)
    except (RuntimeError, IndexError, ZeroDivisionError, AssertionError, ValueError):
        return False
    return bool(torch.isfinite(loss))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", VALID)
def test_what_passes_runs_in_fair(changes):
    model = section(changes)
    check_model(model)
    assert fair_runs(model)


@pytest.mark.parametrize(("changes", "message"), INVALID)
def test_what_cannot_run_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError) as error:
        check_model(section(changes))
    assert str(error.value) == message


def comparable(changes) -> bool:
    """FAIR's constructor does not compare lengths, and has no 1-D loss."""
    model = section(changes)
    names = ("input_size", "q_stride", "mask_unit_size", "patch_kernel", "patch_stride", "patch_padding")
    return {len(getattr(model, name)) for name in names} in ({2}, {3})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", [changes for changes, _ in INVALID if comparable(changes)])
def test_what_is_refused_fails_in_fair(changes):
    assert not fair_runs(section(changes))


def test_signals_pass():
    check_model(section(SIGNAL))


@pytest.mark.parametrize("units", [2, 3, 7, 8, 9, 10, 49, 392])
@pytest.mark.parametrize("hundredths", range(1, 100, 7))
def test_the_largest_ratio_that_is_named_is_valid(units, hundredths):
    ratio = hundredths / 100
    model = section({"input_size": (32 * units, 32), "mask_ratio": ratio})
    assert mask_unit_count(model) == units
    if 1 <= kept_mask_units(units, ratio) < units:
        check_model(model)
        return
    with pytest.raises(UserError, match="at most") as error:
        check_model(model)
    largest = float(str(error.value).rsplit("so ", 1)[1].split(" ")[0])
    check_model(model.model_copy(update={"mask_ratio": largest}))


@pytest.mark.parametrize("size", range(33, 600, 9))
def test_the_nearest_sizes_that_are_named_are_valid_and_nearest(size):
    if size % 32 == 0:
        check_model(section({"input_size": (size, 64)}))
        return
    with pytest.raises(UserError) as error:
        check_model(section({"input_size": (size, 64)}))
    below, above = map(int, str(error.value).rsplit("-> ", 1)[1].split(" or "))
    assert below < size < above == below + 32
    check_model(section({"input_size": (below, 64)}))
    check_model(section({"input_size": (above, 64)}))


def settings(*overrides: str) -> RunConfig:
    return load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.in_chans=4"],
            "model.in_chans: 4, but pictures give 1 (grey) or 3 channels; use data.kind=array",
        ),
        (
            ["data.kind=array", "model.in_chans=4"],
            "data.mean: 3 values for model.in_chans 4; give one a channel, or null for mean and std",
        ),
        (
            ["data.std=1", "data.mean=0,0,0"],
            "data.std: 1 value for model.in_chans 3; give one a channel, or null for mean and std",
        ),
        (["train.epochs=10"], "optim.warmup_epochs: 40 must be less than train.epochs 10"),
        (["train.epochs=40"], "optim.warmup_epochs: 40 must be less than train.epochs 40"),
        (
            ["train.steps=10", "optim.warmup_steps=10"],
            "optim.warmup_steps: 10 must be less than train.steps 10",
        ),
        (["optim.min_lr=0.1"], "optim.min_lr: 0.1 is above the peak learning rate, 0.0008"),
        (
            ["train.activation_checkpointing=1,4"],
            "train.activation_checkpointing: there is no stage 4; the stages are 0 to 3",
        ),
    ],
)
def test_settings_that_do_not_agree(overrides, message):
    with pytest.raises(UserError) as error:
        settings(*overrides)
    assert str(error.value) == message


def test_images_are_two_dimensional():
    config = settings().model_copy(update={"model": ModelSection(**{**TINY, **VIDEO})})
    with pytest.raises(UserError) as error:
        check_settings(config)
    assert str(error.value) == "data.kind: images are 2-D, model.input_size [4, 64, 64] is 3-D; use data.kind=array"


def test_settings_that_do_agree():
    settings("train.epochs=10", "optim.warmup_epochs=0")
    settings("train.steps=10")
    settings("train.epochs=10", "optim.warmup_steps=100000")
    settings("model.in_chans=1", "data.mean=0.5", "data.std=0.5")
    settings("train.activation_checkpointing=all")


@pytest.mark.parametrize(
    ("batch", "micro", "world", "split"),
    [
        (4096, None, 1, (256, 16)),
        (4096, None, 8, (256, 2)),
        (4096, None, 32, (128, 1)),
        (1000, None, 1, (250, 4)),
        (4096, 128, 8, (128, 4)),
        (4096, 4096, 1, (4096, 1)),
        (6, 1, 3, (1, 2)),
    ],
)
def test_world_divides_the_batch(batch, micro, world, split):
    overrides = [f"train.global_batch={batch}", f"train.micro_batch={'null' if micro is None else micro}"]
    found = check_world(settings(*overrides), world)
    assert found == BatchSplit(*split)
    assert found.micro_batch * found.accumulation * world == batch


def test_micro_batch_nobody_chose_is_small_on_a_cpu():
    assert check_world(settings("runtime.device=cpu"), 1) == BatchSplit(32, 128)
    assert check_world(settings(), 1, on_cpu=True) == BatchSplit(32, 128)
    assert check_world(settings("runtime.device=cpu", "train.micro_batch=128"), 1) == BatchSplit(128, 32)


@pytest.mark.parametrize(
    ("batch", "micro", "world", "message"),
    [
        (4096, None, 3, "train.global_batch: 4096 does not divide by 3 ranks; nearest valid: 4095 or 4098"),
        (
            4096,
            100,
            1,
            "train.global_batch: 4096 does not divide by 1 rank x micro_batch 100 = 100; nearest valid: 4000 or 4100",
        ),
        (
            4096,
            64,
            3,
            "train.global_batch: 4096 does not divide by 3 ranks x micro_batch 64 = 192; nearest valid: 4032 or 4224",
        ),
        (4, None, 8, "train.global_batch: 4 does not divide by 8 ranks; nearest valid: 8"),
        (8, None, 0, "world size: 0 is not a whole number above 0"),
    ],
)
def test_world_that_does_not_divide_the_batch(batch, micro, world, message):
    overrides = [f"train.global_batch={batch}", f"train.micro_batch={'null' if micro is None else micro}"]
    with pytest.raises(UserError) as error:
        check_world(settings(*overrides), world)
    assert str(error.value) == message
