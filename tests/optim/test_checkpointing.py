"""Stage checkpointing: which blocks, the same gradients, fewer stored activations, untouched state dicts."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hiera_optim import disable_stage_checkpointing, enable_stage_checkpointing, optimize, restore

from .fair import assert_equal_runs, batch_for, classifier, hiera, mae, run


def stored_bytes(model, x: torch.Tensor) -> int:
    """Bytes that one forward keeps for backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)[0]
    del loss
    return sum(kept.values())


@pytest.mark.parametrize("optimised", [True, False])
@pytest.mark.parametrize("stages", [(2,), (0, 3), "all"])
def test_same_gradients_from_fewer_stored_bytes(stages: tuple[int, ...] | str, optimised: bool) -> None:
    model = mae("drop-path").train()
    if optimised:
        optimize(model, verbose=False)
    x = batch_for(model, 4)
    expected, before = run(model, x), stored_bytes(model, x)
    keys = list(model.state_dict())
    assert enable_stage_checkpointing(model, stages) == {(2,): 2, (0, 3): 2, "all": 5}[stages]
    assert list(model.state_dict()) == keys
    assert stored_bytes(model, x) < before
    assert_equal_runs(run(model, x), expected)
    assert disable_stage_checkpointing(model) == {(2,): 2, (0, 3): 2, "all": 5}[stages]
    assert stored_bytes(model, x) == before
    assert type(model.blocks[2]) is hiera.HieraBlock


def test_calls_add_up_and_the_decoder_is_a_choice() -> None:
    model = mae()
    assert enable_stage_checkpointing(model) == 2
    assert enable_stage_checkpointing(model) == 0
    assert enable_stage_checkpointing(model, (0, 2), decoder=True) == 3
    assert model._hiera_checkpoint == frozenset({0, 2, 3})
    assert model._hiera_checkpoint_decoder
    optimize(model, verbose=False)
    x = batch_for(model)
    assert stored_bytes(model, x) < stored_bytes(optimize(mae(), verbose=False), x)
    assert_equal_runs(run(model, x), run(mae(), x))
    assert disable_stage_checkpointing(restore(model)) == 5
    assert vars(model).keys() == vars(mae()).keys()
    assert enable_stage_checkpointing(classifier(), "all", decoder=True) == 5


def test_evaluation_recomputes_nothing_and_copies_keep_the_choice() -> None:
    model = mae()
    enable_stage_checkpointing(model, "all", decoder=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert disable_stage_checkpointing(other) == 7
    x = batch_for(model)
    assert stored_bytes(optimize(model, verbose=False).eval(), x) == stored_bytes(
        optimize(mae(), verbose=False).eval(), x
    )


@pytest.mark.parametrize("stages", [(4,), (-1,), "last", (True,), ("2",)])
def test_unknown_stages_are_refused(stages) -> None:
    model = mae()
    with pytest.raises(ValueError, match="stages must be"):
        enable_stage_checkpointing(model, stages)
    with pytest.raises(TypeError, match="not FAIR's Hiera"):
        enable_stage_checkpointing(torch.nn.Linear(1, 1))
