"""What goes wrong in a run ends in one or two lines, the right exit code, and intact checkpoints."""

import contextlib
import errno
import math
import os
import re
import resource
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import Start, events_of, make_config, make_run, run_to_end, state_of, wait_for_step

from hiera_optim.training import TrainStep
from service.train import checkpoint, loop
from service.train.checkpoint import list_checkpoints, load_tensors, verify


def array_run(folder, poison=None, **train):
    """A run over 20 samples of noise, of which one may have a NaN pixel."""
    data = np.random.default_rng(0).standard_normal((20, 3, 64, 64), dtype=np.float32)
    if poison is not None:
        data[poison, 1, 40, 7] = np.nan
    np.save(folder / "data.npy", data)
    source = {"kind": "array", "path": folder / "data.npy", "mean": None, "std": None, "val_fraction": 0.0}
    return make_run(folder / "run", make_config(data=source, train=train))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_pixel_stops_all_ranks_and_names_step_rank_and_sample(tmp_path, ranks):
    folder = array_run(tmp_path, poison=11, log_every=5)
    codes, output = Start(folder, ranks).finish()
    assert codes == [70] * ranks, output
    state = state_of(folder)
    assert (state["status"], state["exit_code"]) == ("failed", 70)
    # An epoch is five steps, so the sample comes in one of the first five.
    step = int(state["reason"].split("at step ")[1].split()[0])
    sample = int(state["reason"].split("sample ")[1].split()[0])
    rank = int(state["reason"].split("on rank ")[1].split(",")[0])
    assert f"row 11 of {tmp_path / 'data.npy'})" in state["reason"]
    assert 1 <= step <= 5
    assert sample // 4 == step - 1
    assert rank == (sample % 4) // (4 // ranks)
    assert state["reason"].count("\n") == 1
    for saved, path in list_checkpoints(folder / "checkpoints"):
        assert saved < step
        assert all(t.isfinite().all() for t in load_tensors(path).values())
    if step > 3:
        assert "last good checkpoint is step-00000003" in state["reason"]
    assert all(math.isfinite(e["loss"]) for e in events_of(folder))


def test_weights_that_overflow_stop_the_run_without_blaming_the_data(tmp_path):
    folder = make_run(tmp_path, make_config(optim={"lr": 1e30, "warmup_steps": 0, "clip_grad_norm": None}))
    codes, output = Start(folder).finish()
    assert codes == [70], output
    assert "optim.lr" in state_of(folder)["reason"]
    assert "input" not in state_of(folder)["reason"]


def test_another_models_checkpoint_is_refused(tmp_path):
    folder = make_run(tmp_path, make_config(train={"steps": 3}))
    run_to_end(folder)
    other = make_config(model=make_config().model.model_copy(update={"decoder_depth": 2}))
    codes, _ = Start(make_run(folder, other)).finish()
    assert codes == [78]
    reason = state_of(folder)["reason"]
    assert "decoder_blocks.1." in reason
    assert "not in the checkpoint" in reason
    codes, _ = Start(make_run(folder, make_config(optim={"name": "muon"}))).finish()
    assert codes == [78]
    assert "optimizer" in state_of(folder)["reason"]


def test_a_truncated_newest_checkpoint_falls_back_and_ends_the_same(tmp_path):
    whole = make_run(tmp_path / "whole", make_config())
    run_to_end(whole)
    folder = make_run(tmp_path / "cut", make_config(train={"steps": 9}))
    run_to_end(folder)
    (_, older), (_, newest) = list_checkpoints(folder / "checkpoints")
    os.truncate(newest, newest.stat().st_size // 2)
    output = run_to_end(make_run(folder, make_config()))
    assert output.count("is damaged") == 1
    assert "step-00000009.safetensors is damaged" in output
    assert f"taking {older.name}" in output
    assert list_checkpoints(folder / "checkpoints")[-1][0] == 12
    mine, theirs = (load_tensors(f / "checkpoints" / "step-00000012.safetensors") for f in (folder, whole))
    assert all(t.isfinite().all() for t in mine.values())
    assert mine.keys() == theirs.keys()


def impatient():
    loop.LAST_SAVE_DELAYS = (0.01, 0.01)


def small_files(_rank):
    """Files of this process may not grow past 8 KiB, which a checkpoint does: a write fails in the middle."""
    impatient()
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))


def test_checkpoints_that_cannot_be_written_do_not_stop_training(tmp_path):
    folder = make_run(tmp_path, make_config(train={"steps": 3}))
    run_to_end(folder)
    codes, output = Start(make_run(folder, make_config()), before=small_files).finish()
    # Not 1, after which torchrun would train the last steps again and again.
    assert codes == [70], output
    assert output.count("trying again") == 2
    assert "could not write" in output
    assert "File too large" in output
    state = state_of(folder)
    assert "could not be written" in state["reason"]
    assert [e["step"] for e in events_of(folder) if "loss" in e][-1] == 12
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003.safetensors"]
    verify(folder / "checkpoints" / "step-00000003.safetensors")
    assert "resuming from step-00000003" in run_to_end(folder)
    assert state_of(folder)["status"] == "finished"


def full_at_first(errors, seconds=0.0):
    """A disk that is full for so many writes of the last checkpoint, and says so after so long."""
    impatient()
    write, left = checkpoint.write_checkpoint, [errors]

    def refuse(path, tensors, meta):
        if left[0] and meta["step"] == 12:
            left[0] -= 1
            time.sleep(seconds)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, tensors, meta)

    checkpoint.write_checkpoint = refuse


def full_thrice(_rank):
    full_at_first(3)


def test_the_last_checkpoint_is_tried_again_rather_than_trained_again(tmp_path):
    folder = make_run(tmp_path, make_config())
    codes, output = Start(folder, 2, before=full_thrice).finish()
    assert codes == [0, 0], output
    assert "free some space" in output
    assert "trying again" in output
    assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [9, 12]


def slowly_full(_rank):
    full_at_first(6, seconds=0.5)
    loop.LAST_SAVE_DELAYS = (0.5,) * 6


def test_all_attempts_together_may_take_longer_than_the_collective_timeout(tmp_path):
    folder = make_run(tmp_path, make_config(runtime={"collective_timeout_seconds": 3}))
    codes, output = Start(folder, 2, before=slowly_full).finish()
    assert codes == [0, 0], output
    assert list_checkpoints(folder / "checkpoints")[-1][0] == 12


def full_and_patient(_rank):
    full_at_first(100)
    loop.LAST_SAVE_DELAYS = (600.0, 600.0)


@pytest.mark.parametrize("heard_by", [0, 1])
def test_a_stop_while_the_last_save_waits_ends_the_run_without_another_attempt(tmp_path, heard_by):
    folder = make_run(tmp_path, make_config(runtime={"collective_timeout_seconds": 3600}))
    start = Start(folder, 2, before=full_and_patient)
    start.wait_for_output("trying again")
    start.signal(15, rank=heard_by)
    codes, output = start.finish()
    # Not 1 or 75, after which a scheduler would have the last steps trained again.
    assert codes == [70, 70], output
    assert output.count("could not write") == 1
    assert "could not be written" in state_of(folder)["reason"]


@contextlib.contextmanager
def disk_of(size):
    """A folder on a disk of `size` bytes, and what makes it large."""
    disk = Path(tempfile.mkdtemp())
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        yield disk, partial(subprocess.run, ["mount", "-o", "remount,size=64m", str(disk)], check=True)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
        disk.rmdir()


def impatient_rank(_rank):
    impatient()


@pytest.fixture(scope="module")
def checkpoint_size(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("size"), make_config(train={"steps": 3}))
    run_to_end(folder)
    return list_checkpoints(folder / "checkpoints")[-1][1].stat().st_size


@pytest.mark.system
def test_a_full_disk_does_not_stop_training_and_ends_it_without_a_restart(checkpoint_size):
    with disk_of(int(1.5 * checkpoint_size)) as (disk, enlarge):
        folder = make_run(disk / "run", make_config())
        codes, output = Start(folder, before=impatient_rank).finish()
        assert codes == [70], output
        assert "No space left on device; free some space" in output
        reason = state_of(folder)["reason"]
        assert re.search(rf"written to {folder}/checkpoints, which needs [\d.]+ MB and has [\d.]+ MB free;\n", reason)
        assert reason.count("\n") == 1
        ((step, path),) = list_checkpoints(folder / "checkpoints")
        verify(path)
        assert step == 3
        assert not list((folder / "checkpoints").glob(".*"))
        enlarge()
        assert "resuming from step-00000003" in run_to_end(folder)


@pytest.mark.system
def test_a_disk_with_room_for_two_checkpoints_is_enough(checkpoint_size):
    """The oldest goes before the new one is written, when it cannot go after."""
    with disk_of(int(2.6 * checkpoint_size)) as (disk, _):
        folder = make_run(disk / "run", make_config())
        run_to_end(folder)
        assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [9, 12]


def slow_disk(_rank):
    """Each checkpoint takes half a second."""
    fsync = os.fsync
    checkpoint.os.fsync = lambda descriptor: (time.sleep(0.25), fsync(descriptor))


def test_a_slow_disk_skips_checkpoints_but_never_the_last(tmp_path):
    folder = make_run(tmp_path, make_config(checkpoint={"every_steps": 1}))
    codes, output = Start(folder, before=slow_disk).finish()
    assert codes == [0], output
    assert list_checkpoints(folder / "checkpoints")[-1][0] == 12


def sleepy(rank, at_call):
    """Rank 1 takes three seconds for one of its steps."""
    call, count = TrainStep.__call__, [0]

    def slowly(self, x, sample_ids):
        if rank == 1 and count[0] == at_call:
            time.sleep(3)
        count[0] += 1
        return call(self, x, sample_ids)

    TrainStep.__call__ = slowly


def sleepy_at_first(rank):
    sleepy(rank, 0)


def sleepy_later(rank):
    sleepy(rank, 4)


def test_a_rank_that_compiles_longer_than_the_timeout_is_waited_for_but_not_later(tmp_path):
    config = make_config(train={"steps": 6}, runtime={"collective_timeout_seconds": 1})
    codes, output = Start(make_run(tmp_path / "first", config), 2, before=sleepy_at_first).finish()
    assert codes == [0, 0], output
    codes, output = Start(make_run(tmp_path / "later", config), 2, before=sleepy_later).finish()
    assert 1 in codes, output
    # gloo's words for it depend on what the waiting rank was doing.
    assert re.search(r"[Tt]imed? ?out", output), output


def test_minutes_also_ask_for_checkpoints(tmp_path):
    config = make_config(checkpoint={"every_steps": 1000, "every_minutes": 1e-9, "keep": 20})
    folder = make_run(tmp_path, config)
    run_to_end(folder, ranks=2)
    assert len(list_checkpoints(folder / "checkpoints")) > 2


def test_batches_that_do_not_divide_name_the_fields(tmp_path):
    codes, _ = Start(make_run(tmp_path, make_config(train={"global_batch": 5})), 2).finish()
    assert codes == [78, 78]
    assert "train.global_batch: 5 does not divide by 2 ranks" in state_of(tmp_path)["reason"]


def test_a_stop_during_validation_is_obeyed(tmp_path):
    config = make_config(
        data={"synthetic_samples": 4000},
        train={"steps": 400, "eval_every": 3, "eval_samples": 4000},
    )
    folder = make_run(tmp_path, config)
    start = Start(folder, 2)
    wait_for_step(folder, 3)
    start.signal(15, rank=1)
    codes, output = start.finish(timeout=20)
    assert codes == [75, 75], output
    assert state_of(folder)["step"] == 3
    assert not any("val_loss" in e for e in events_of(folder))


def test_bf16_with_masters_resumes_bitwise(tmp_path):
    config = make_config(train={"precision": "bf16"})
    whole, folder = make_run(tmp_path / "whole", config), make_run(tmp_path / "cut", config)
    run_to_end(whole)
    start = Start(folder)
    wait_for_step(folder, 3)
    start.kill()
    run_to_end(folder)
    name = "checkpoints/step-00000012.safetensors"
    mine, theirs = load_tensors(folder / name), load_tensors(whole / name)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert mine["model.patch_embed.proj.weight"].dtype == torch.float32
