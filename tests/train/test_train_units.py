"""The trainer's parts alone: FLOPs, trivial loss, metrics.jsonl, late values, batches, optimizers."""

import json
import math
import os
import re

import pytest
import torch
from runs import TINY, make_config
from torch.utils.flop_counter import FlopCounterMode

from hiera_optim import Geometry
from hiera_optim.training import StepOutput
from service.config.schema import ModelSection, OptimSection, TrainSection
from service.data import Stream, open_data, validation
from service.errors import UserError
from service.train.checkpoint import write_checkpoint
from service.train.compiling import CompileWatch
from service.train.evaluate import trivial_loss
from service.train.flops import forward_flops, peak_flops, training_flops
from service.train.model import (
    build_fair_model,
    build_model,
    build_optimizer,
    checkpoint_meta,
    checkpoint_tensors,
    restore,
)
from service.train.progress import Console, MetricsLog, StepValues, duration
from service.train.signals import StopRequest, signal_name
from service.train.workers import BoundaryVote, Workers

CLIP = ModelSection(
    input_size=(8, 64, 64),
    q_stride=(1, 2, 2),
    mask_unit_size=(1, 8, 8),
    patch_kernel=(3, 7, 7),
    patch_stride=(2, 4, 4),
    patch_padding=(1, 3, 3),
    embed_dim=8,
    stages=(1, 2, 1, 1),
    decoder_embed_dim=16,
    decoder_depth=1,
    decoder_num_heads=2,
)
SIGNAL = ModelSection(
    input_size=(128,),
    in_chans=5,
    q_stride=(2,),
    mask_unit_size=(8,),
    patch_kernel=(7,),
    patch_stride=(4,),
    patch_padding=(3,),
    embed_dim=8,
    stages=(2, 1, 1, 1),
    decoder_embed_dim=16,
    decoder_depth=2,
    decoder_num_heads=2,
)
DEEP = TINY.model_copy(update={"stages": (2, 2, 3, 1), "q_pool": 3, "mlp_ratio": 3.0, "drop_path_rate": 0.0})
ONE = Workers(0, 0, 1, torch.device("cpu"), None)


@pytest.mark.parametrize("section", [TINY, DEEP, CLIP])
def test_model_flops_are_what_torch_counts_less_what_fair_computes_in_vain(section):
    model, (units, tokens) = build_fair_model(section, 0), units_of(section)
    x = torch.randn(1, section.in_chans, *section.input_size)
    with FlopCounterMode(display=False) as counter:
        model(x, mask_ratio=section.mask_ratio)
    kept = int(units * (1 - section.mask_ratio))
    # FAIR embeds the patches of masked units and predicts the tokens of kept ones, and uses neither.
    patch = 2 * math.prod(section.patch_kernel) * section.in_chans * section.embed_dim
    final = tokens // math.prod(section.q_stride) ** section.q_pool
    side = section.patch_stride[-1] * section.q_stride[-1] ** section.q_pool
    predict = 2 * section.decoder_embed_dim * side * side * section.in_chans
    in_vain = (units - kept) * tokens * patch + kept * final * predict
    assert forward_flops(section) == counter.get_total_flops() - in_vain
    assert training_flops(section) == 3 * forward_flops(section)


def units_of(section):
    model = build_fair_model(section, 0)
    return math.prod(model.mask_spatial_shape), math.prod(section.mask_unit_size)


def test_peaks_are_found_by_whole_words_and_prefer_the_longer_name():
    assert peak_flops("NVIDIA H100 NVL") == 835e12
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA GH200 480GB") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA A40") == 150e12
    assert peak_flops("NVIDIA RTX A4000") is None
    assert peak_flops("Some CPU") is None


@pytest.mark.parametrize("section", [TINY, CLIP])
def test_trivial_loss_is_the_mean_square_of_fairs_labels(section):
    model = build_fair_model(section, 0)
    x = torch.randn(2, section.in_chans, *section.input_size)
    x[0, :, ..., :24] = 0.5
    everything = torch.ones(2, math.prod(model.tokens_spatial_shape_final), dtype=torch.bool)
    label = getattr(model, f"get_pixel_label_{len(section.input_size)}d")(x, everything)
    geometry = Geometry.from_model(model)
    mine = float(trivial_loss(x, geometry.pred_stride, geometry.frame_stride))
    assert mine == pytest.approx(float(label.square().mean()), rel=1e-5)
    assert mine < 0.95


def test_trivial_loss_of_signals_is_near_one():
    geometry = Geometry.from_model(build_fair_model(SIGNAL, 0))
    loss = trivial_loss(torch.randn(2, 5, 128), geometry.pred_stride, geometry.frame_stride)
    values = geometry.pred_stride * 5
    assert float(loss) == pytest.approx((values - 1) / values, rel=1e-4)


def test_metrics_log_drops_what_comes_again_and_half_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (4, 8, 12):
        assert log.write({"step": step, "loss": 1.0 / step}) is None
    log.write({"step": 8, "val_loss": float("nan")})
    with open(path, "a") as file:
        file.write('not json\n{"step": 3}')
    log = MetricsLog(path, 8)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 4, "loss": 0.25}, {"step": 8, "loss": 0.125}, {"step": 8, "val_loss": None}]
    assert log.validated(8)
    assert not log.validated(4)


def test_a_folder_in_the_records_place_is_an_error_in_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^\S+ is not a regular file; move it away .*$"):
        MetricsLog(tmp_path, 0)


def test_a_record_on_a_full_device_is_a_message_not_an_error(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    assert "No space left" in log.write({"step": 1})


def test_values_survive_the_step_that_overwrites_them():
    values, report = StepValues(4, torch.device("cpu")), torch.zeros(3)
    output = StepOutput(*report.unbind())
    for step in range(1, 4):
        report.copy_(torch.tensor([step, 10.0 * step, 0.0]))
        values.record(output)
    values.send()
    report.copy_(torch.tensor([math.nan, 1.0, 1.0]))
    values.record(output)
    assert [(row.loss, row.grad_norm) for row in values.receive()] == [(1, 10), (2, 20), (3, 30)]
    assert values.receive() == []
    values.send()
    (row,) = values.receive()
    assert not row.finite


def test_lines_without_a_terminal(capsys):
    console = Console(speaks=True)
    console.begin(0, 10)
    console.report(1, 1.5, math.nan, math.nan)
    console.report(5, 0.91234, 12.34, 3723.0)
    console.warn("look out")
    Console(speaks=False).say("silence")
    output = capsys.readouterr()
    assert output.out == "step 1/10  loss 1.5000\nstep 5/10  loss 0.9123  12.3 samples/s  1:02:03 left\n"
    assert output.err == "hiera-train: warning: look out\n"


def test_lines_on_a_terminal_without_a_width(capsys, monkeypatch):
    outer, inner = os.openpty()
    with os.fdopen(inner, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        console = Console(speaks=True)
        console.begin(0, 10)
        console.report(5, 0.91234, 12.34, 1.0)
        os.close(outer)
    assert capsys.readouterr().out.startswith("step 5/10  loss")


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    console = Console(speaks=True)
    console.begin(2, 4)
    console.report(3, 0.5, 12.34, 1.0)
    console.advance()
    console.say("a line")
    console.close()
    text = capsys.readouterr().err
    assert "loss 0.5000, 12.3 samples/s" in text
    assert re.search(r"3/4 \[.*<", text)
    assert "a line" in text


def test_durations():
    assert duration(3723.2) == "1:02:03"
    assert duration(90000) == "1 d 1:00:00"
    assert duration(math.nan) == "?"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_masters_start_from_the_weights_as_drawn_and_come_back_from_a_checkpoint(tmp_path, name):
    config = make_config(optim={"name": name})

    def build(seed):
        fair = build_fair_model(TINY, seed)
        weights = {key: p.detach().clone() for key, p in fair.named_parameters()}
        model = build_model(config.train, fair, torch.device("cpu"), "bf16")
        return weights, model, build_optimizer(model, config.optim, 1e-3, weights)

    weights, model, optimizer = build(1)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert all(torch.equal(optimizer.master_parameters()[key], w) for key, w in weights.items())
    path = tmp_path / "step-00000001.safetensors"
    write_checkpoint(path, checkpoint_tensors(optimizer), checkpoint_meta(config, 1))
    _, other, restored = build(2)
    restore(path, restored)
    assert all(torch.equal(restored.master_parameters()[key], w) for key, w in weights.items())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_what_is_not_decayed():
    model = build_fair_model(TINY, 0)
    weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimSection(weight_decay=0.5), 1e-1, weights)
    optimizer.zero_grad()
    optimizer.step()
    after = optimizer.master_parameters()
    still = {key for key, w in weights.items() if w.any() and torch.equal(w, after[key])}
    assert "pos_embed" in still
    assert "blocks.0.norm1.weight" in still
    assert {"blocks.0.attn.qkv.weight", "decoder_pos_embed", "mask_token"}.isdisjoint(still)


def test_a_model_that_cannot_be_is_an_error_in_one_line():
    with pytest.raises(UserError, match=r"^the model section describes no Hiera: .+$"):
        build_fair_model(TINY.model_copy(update={"q_pool": 4}), 0)
    section = TrainSection(activation_checkpointing=(7,))
    with pytest.raises(UserError, match=r"activation_checkpointing"):
        build_model(section, build_fair_model(TINY, 0), torch.device("cpu"), "fp32")


def test_weights_depend_on_the_seed_alone_and_leave_torchs_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (dict(build_fair_model(TINY, seed).named_parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["patch_embed.proj.weight"], other["patch_embed.proj.weight"])


def test_a_single_ranks_vote_counts_at_once():
    vote, stop = BoundaryVote(ONE), StopRequest()
    vote.cast(0, save=True)
    assert vote.save_wanted
    assert not vote.stopping(stop)
    vote.saved()
    assert not vote.save_wanted
    stop._handle(15, None)
    stop._handle(10, None)
    assert vote.stopping(stop)
    assert signal_name(vote.stop_signal) == "SIGTERM"
    assert signal_name(200) == "signal 200"


def test_ranks_and_micro_batches_share_out_the_same_samples():
    config = make_config()
    source, held_out = open_data(config.data, config.model, seed=3)

    def step(world_size, micro_batch, number):
        seen = {}
        for rank in range(world_size):
            stream = Stream(
                source,
                global_batch=8,
                micro_batch=micro_batch,
                rank=rank,
                world_size=world_size,
                start_step=number,
                seed=3,
                threads=1,
            )
            for _ in range(8 // world_size // micro_batch):
                x, ids = next(stream)
                seen |= {int(i): pixels for i, pixels in zip(ids, x, strict=True)}
            stream.close()
        return seen

    whole = step(1, 8, 5)
    assert sorted(whole) == list(range(40, 48))
    for world_size, micro_batch in [(1, 2), (2, 4), (2, 1), (4, 2)]:
        parts = step(world_size, micro_batch, 5)
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[i], whole[i]) for i in whole)

    def held(world_size):
        ids = []
        for rank in range(world_size):
            for _, sample_ids, real in validation(held_out, micro_batch=2, rank=rank, world_size=world_size, samples=7):
                ids += sample_ids[:real].tolist()
        return sorted(ids)

    assert len(held(1)) == 7
    assert held(1) == held(2) == held(3)


def test_compilations_are_counted_and_passed_on(monkeypatch):
    from triton import knobs

    seen = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **details: seen.append(details["cache_hit"]))
    watch = CompileWatch().install()
    for hit in (True, False, True):
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert (watch.hits, watch.misses) == (2, 1)
    assert seen == [True, False, True]
