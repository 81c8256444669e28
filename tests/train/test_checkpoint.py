"""A checkpoint exists whole or not at all, and the newest whole one is found."""

import errno
import os
import time

import pytest
import torch
from safetensors.torch import load_file

from service.errors import UserError
from service.train import checkpoint
from service.train.checkpoint import (
    DamagedCheckpoint,
    Saver,
    check_same_shapes,
    checkpoint_path,
    list_checkpoints,
    load_tensors,
    newest_whole,
    read_meta,
    remove_leftovers,
    verify,
    write_checkpoint,
)

META = {"format": 1, "step": 3, "samples": 12}


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "model.weight": torch.randn(5, 3, generator=generator),
        "model.bias": torch.randn(3, generator=generator).to(torch.bfloat16),
        "optim.step": torch.tensor(3),
        "optim.flags": torch.tensor([True, False, True]),
        "optim.transposed": torch.randn(4, 6, generator=generator).t(),
        "optim.empty": torch.empty(0, 2),
    }


def write(folder, step, **changes):
    folder.mkdir(exist_ok=True)
    path = checkpoint_path(folder, step)
    write_checkpoint(path, tensors(), META | {"step": step} | changes)
    return path


def test_reads_back_what_was_written_also_with_the_library(tmp_path):
    path = write(tmp_path, 3)
    verify(path)
    assert read_meta(path) == META
    for loaded in (load_tensors(path), load_file(path)):
        assert loaded.keys() == tensors().keys()
        for name, tensor in tensors().items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)
    assert load_tensors(path, "model.").keys() == {"weight", "bias"}
    assert os.listdir(tmp_path) == ["step-00000003.safetensors"]


def test_every_cut_and_every_flipped_byte_is_noticed(tmp_path):
    path = write(tmp_path, 3)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpoint):
            verify(path)
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(DamagedCheckpoint):
            verify(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DamagedCheckpoint):
        verify(path)
    path.write_bytes(whole)
    verify(path)


def test_falls_back_to_the_newest_whole_one_and_names_both(tmp_path):
    for step in (1, 2, 3):
        path = write(tmp_path, step)
    os.truncate(path, 100)
    lines: list[str] = []
    assert newest_whole(tmp_path, lines.append, set_aside=True) == (2, checkpoint_path(tmp_path, 2))
    assert len(lines) == 1
    assert "step-00000003.safetensors is damaged" in lines[0]
    assert "step-00000002.safetensors" in lines[0]
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 2]
    assert newest_whole(tmp_path, lines.append) == (2, checkpoint_path(tmp_path, 2))
    assert len(lines) == 1


def test_nothing_whole_is_an_error_and_nothing_at_all_is_not(tmp_path):
    assert newest_whole(tmp_path / "absent", print) is None
    os.truncate(write(tmp_path, 1), 9)
    with pytest.raises(UserError, match=r"none of the 1 checkpoints.*\n.*start again"):
        newest_whole(tmp_path, print)


def test_a_file_under_another_steps_name_is_passed_over(tmp_path):
    write(tmp_path, 3).rename(checkpoint_path(tmp_path, 9))
    write(tmp_path, 2)
    lines: list[str] = []
    assert newest_whole(tmp_path, lines.append) == (2, checkpoint_path(tmp_path, 2))
    assert "step-00000009.safetensors is damaged (it holds step 3)" in lines[0]


def test_a_named_pipe_is_passed_over_and_not_waited_for(tmp_path):
    write(tmp_path, 2)
    os.mkfifo(checkpoint_path(tmp_path, 3))
    lines: list[str] = []
    assert newest_whole(tmp_path, lines.append, set_aside=True) == (2, checkpoint_path(tmp_path, 2))
    assert "not a regular file" in lines[0]


def test_other_format_is_refused(tmp_path):
    with pytest.raises(UserError, match="format 2"):
        read_meta(write(tmp_path, 1, format=2))


def test_another_models_checkpoint_names_the_first_difference(tmp_path):
    saved = {"a": torch.zeros(2), "b": torch.zeros(3, 4), "c": torch.zeros(1)}
    wanted = {"a": torch.zeros(2), "b": torch.zeros(3, 5), "d": torch.zeros(1)}
    check_same_shapes(tmp_path, saved, saved)
    message = r"b is \[3, 4\], this configuration's is \[3, 5\] \(and 2 more"
    with pytest.raises(UserError, match=message) as caught:
        check_same_shapes(tmp_path, saved, wanted)
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize(
    ("before", "after", "size_only"),
    [
        ({"pos_embed": 64}, {"pos_embed": 96}, True),
        ({"pos_embed_spatial": 64, "pos_embed_temporal": 2}, {"pos_embed_spatial": 96, "pos_embed_temporal": 2}, True),
        ({"pos_embed": 128}, {"pos_embed_spatial": 64, "pos_embed_temporal": 2}, False),
        ({"pos_embed": 64, "decoder_pos_embed": 4}, {"pos_embed": 96}, False),
    ],
)
def test_resampling_is_offered_only_where_it_helps(tmp_path, before, after, size_only):
    def all_tensors(lengths):
        weights = {f"model.{name}": torch.zeros(1, length, 8) for name, length in lengths.items()}
        return weights | {f"optim.exp_avg.{name}": torch.zeros(1, length, 8) for name, length in lengths.items()}

    with pytest.raises(UserError, match="another model or optimizer") as caught:
        check_same_shapes(tmp_path / "run" / "checkpoints" / "x", all_tensors(before), all_tensors(after))
    assert (f"train.init_from={tmp_path / 'run'} with" in str(caught.value)) == size_only


def test_saver_keeps_the_newest_and_copies_before_training_goes_on(tmp_path):
    saver = Saver(tmp_path / "checkpoints", keep=2)
    weight = torch.zeros(1000)
    for step in range(1, 6):
        weight += 1
        saver.start(step, {"model.weight": weight, "optim.step": torch.tensor(step)}, META | {"step": step})
        weight += 100
        weight -= 100
    saved = saver.wait()
    assert saved is not None
    assert (saved.step, saved.error) == (5, None)
    assert saver.poll() is None
    assert [step for step, _ in list_checkpoints(saver.folder)] == [4, 5]
    for step, path in list_checkpoints(saver.folder):
        assert load_tensors(path, "model.")["weight"].unique().tolist() == [step]


def test_full_disk_leaves_the_old_checkpoint_and_no_temporary_file(tmp_path, monkeypatch):
    saver = Saver(tmp_path, keep=2)
    saver.start(1, tensors(), META)
    assert saver.wait().error is None

    def no_space(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", no_space)
    saver.start(2, tensors(), META)
    saved = saver.wait()
    assert saved.step == 2
    assert saved.error.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["step-00000001.safetensors"]
    verify(checkpoint_path(tmp_path, 1))
    monkeypatch.undo()
    saver.start(3, tensors(), META)
    assert saver.wait().error is None


def test_a_slow_disk_does_not_hold_training_up(tmp_path, monkeypatch):
    slow = checkpoint.os.fsync

    def slowly(descriptor):
        time.sleep(0.2)
        slow(descriptor)

    monkeypatch.setattr(checkpoint.os, "fsync", slowly)
    saver = Saver(tmp_path, keep=2)
    saver.start(1, tensors(), META)
    assert saver.busy
    assert saver.poll() is None
    assert saver.wait().step == 1
    assert not saver.busy


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    write(tmp_path, 1)
    (tmp_path / ".step-00000002.safetensors.123.tmp").write_bytes(b"half")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["step-00000001.safetensors"]


def test_any_failure_of_the_writing_thread_is_reported(tmp_path):
    saver = Saver(tmp_path, keep=2)
    saver.start(1, {"model.weight": torch.zeros(2, dtype=torch.complex64)}, META)  # no safetensors dtype
    saved = saver.wait()
    assert saved is not None
    assert isinstance(saved.error, KeyError)
    assert list_checkpoints(tmp_path) == []
