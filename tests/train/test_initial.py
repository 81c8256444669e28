"""train.init_from: a run that starts from another one's weights, at the same input size or at another."""

import shutil

import pytest
import torch
from runs import TINY, Start, final_tensors, make_config, make_run, run_to_end, state_of

from service.errors import UserError
from service.train.checkpoint import checkpoint_path, list_checkpoints, load_tensors, write_checkpoint
from service.train.export import write_weights
from service.train.initial import initial_weights
from service.train.model import build_fair_model

LARGER = TINY.model_copy(update={"input_size": (96, 64)})


@pytest.fixture
def weights():
    return {name: p.detach() for name, p in build_fair_model(TINY, 5).named_parameters()}


def settings(path, interpolate=False):
    return make_config(train={"init_from": path, "interpolate_position_embeddings": interpolate}).train


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run_with(folder, weights, model=TINY):
    """A run directory with one checkpoint of these weights."""
    path = checkpoint_path(folder / "checkpoints", 3)
    path.parent.mkdir(parents=True)
    tensors = {f"model.{name}": value for name, value in weights.items()} | {"optim.step": torch.tensor(3)}
    write_checkpoint(path, tensors, {"format": 1, "step": 3, "model": model.model_dump(mode="json")})
    return path


def test_a_run_directory_a_checkpoint_and_exported_files_give_the_same_weights(tmp_path, weights):
    checkpoint = run_with(tmp_path / "run", weights)
    for suffix in (".pth", ".safetensors"):
        write_weights(weights, tmp_path / f"weights{suffix}")
    model = build_fair_model(TINY, 0)
    for path in (tmp_path / "run", checkpoint, tmp_path / "weights.pth", tmp_path / "weights.safetensors"):
        assert same(initial_weights(settings(path), model), weights), path
    assert not same(dict(model.named_parameters()), weights)


def test_another_input_size_is_resampled_only_when_asked(tmp_path, weights):
    run_with(tmp_path, weights)
    model = build_fair_model(LARGER, 0)
    with pytest.raises(UserError, match=r"set train\.interpolate_position_embeddings=true") as caught:
        initial_weights(settings(tmp_path), model)
    assert str(caught.value).count("\n") == 1
    model.load_state_dict(initial_weights(settings(tmp_path, interpolate=True), model))
    # An oblong size cannot be told from the number of tokens: the checkpoint says it.
    run_with(tmp_path / "oblong", dict(model.named_parameters()), LARGER)
    square = build_fair_model(TINY, 0)
    square.load_state_dict(initial_weights(settings(tmp_path / "oblong", interpolate=True), square))
    write_weights({name: p.detach() for name, p in model.named_parameters()}, tmp_path / "oblong.pth")
    with pytest.raises(UserError, match="384 tokens of a picture are not square"):
        initial_weights(settings(tmp_path / "oblong.pth", interpolate=True), square)


def test_weights_of_another_model_are_named(tmp_path, weights):
    deeper = build_fair_model(TINY.model_copy(update={"decoder_depth": 2}), 0)
    run_with(tmp_path, weights)
    for interpolate in (False, True):
        with pytest.raises(UserError, match=r"decoder_blocks\.1\.\S+: missing.*\n.*the model section"):
            initial_weights(settings(tmp_path, interpolate), deeper)


def test_files_that_hold_no_weights_are_refused_in_one_or_two_lines(tmp_path, weights):
    model = build_fair_model(TINY, 0)
    damaged = run_with(tmp_path / "damaged", weights)
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\1\2\3\4")
    (tmp_path / "text.pth").write_text("x")
    (tmp_path / "text.safetensors").write_text("x")
    torch.save({"model_state": {"a": 1}}, tmp_path / "numbers.pth")
    torch.save({"model_state": 1}, tmp_path / "number.pth")
    torch.save([1], tmp_path / "list.pth")
    torch.save(model, tmp_path / "pickled.pth")
    for path in (damaged, *tmp_path.glob("*.pth"), tmp_path / "text.safetensors", tmp_path / "gone.pth"):
        with pytest.raises(UserError, match=r"^train\.init_from: ") as caught:
            initial_weights(settings(path), model)
        assert path.name in str(caught.value)
        assert str(caught.value).count("\n") <= 1


def test_a_checkpoint_that_does_not_say_its_model_is_not_called_another_kind_of_file(tmp_path, weights):
    path = run_with(tmp_path, weights)
    write_checkpoint(path, {f"model.{name}": value for name, value in weights.items()}, {"format": 1, "step": 3})
    for given in (path, tmp_path):
        with pytest.raises(UserError, match=r"\.safetensors does not say what model it is of") as caught:
            initial_weights(settings(given), build_fair_model(TINY, 0))
        assert ".pth" not in str(caught.value)
        assert str(caught.value).count("\n") == 1


def test_too_little_memory_is_not_taken_for_a_bad_file(tmp_path, weights, monkeypatch):
    def exhausted(*_arguments, **_settings):
        raise MemoryError

    write_weights(weights, tmp_path / "weights.pth")
    monkeypatch.setattr(torch, "load", exhausted)
    with pytest.raises(MemoryError):
        initial_weights(settings(tmp_path / "weights.pth"), build_fair_model(TINY, 0))


def test_a_run_goes_on_at_another_size_and_resumes_without_what_it_started_from(tmp_path):
    first = make_run(tmp_path / "first", make_config(train={"steps": 3, "eval_every": 0}))
    run_to_end(first)

    slow = {"lr": 1e-9, "warmup_steps": 0}

    def second(steps, **train):
        train = {"steps": steps, "eval_every": 0, "init_from": first} | train
        return make_run(tmp_path / "second", make_config(model=LARGER, train=train, optim=slow))

    codes, _ = Start(second(1)).finish()
    assert codes == [78]
    assert "set train.interpolate_position_embeddings=true" in state_of(tmp_path / "second")["reason"]
    output = run_to_end(second(1, interpolate_position_embeddings=True))
    assert f"starting from {first}" in output
    before, after = load_tensors(list_checkpoints(first / "checkpoints")[-1][1], "model."), final_tensors(second(1))
    # The learning rate is next to nothing, so what is left is the start.
    torch.testing.assert_close(after["model.decoder_pred.weight"], before["decoder_pred.weight"], rtol=0, atol=1e-6)
    shutil.rmtree(first)
    output = run_to_end(second(2, interpolate_position_embeddings=True))
    assert "resuming from step-00000001" in output
    assert "starting from" not in output


def test_resuming_at_another_size_names_the_way(tmp_path):
    folder = make_run(tmp_path, make_config(train={"steps": 3, "eval_every": 0}))
    run_to_end(folder)
    codes, _ = Start(make_run(folder, make_config(model=LARGER))).finish()
    assert codes == [78]
    assert f"train.init_from={folder} with train.interpolate_position_embeddings=true" in state_of(folder)["reason"]
