"""What importing costs and needs: nothing of hiera, timm, torchvision or lightning, and no warning."""

from __future__ import annotations

import subprocess
import sys
import textwrap

BLOCKED = """
import sys
class Filtered:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        blocked = any(name == n or name.startswith(n + ".") for n in {names!r})
        return None if blocked else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Filtered(finder) for finder in sys.meta_path]
"""
STEP = """
    import torch, hiera_optim
    hiera = hiera_optim.import_hiera()
    model = hiera.MaskedAutoencoderHiera(
        input_size=(32, 32), stages=(1, 1), mask_unit_size=(2, 2), q_pool=1, embed_dim=8,
        decoder_embed_dim=8, decoder_depth=1, decoder_num_heads=1, drop_path_rate=0.1)
    hiera_optim.optimize(model, verbose=False)
    model(torch.randn(2, 3, 32, 32))[0].backward()
    keys = [k for k in model.state_dict() if k.startswith("blocks.0.mlp.")]
    assert keys == ["blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias",
                    "blocks.0.mlp.fc2.weight", "blocks.0.mlp.fc2.bias"], keys
"""


def python(code: str, *names: str) -> None:
    blocked = BLOCKED.format(names=names) if names else ""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocked + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_a_step_without_warnings_and_without_timm_being_loaded() -> None:
    python(
        """
    import sys, hiera_optim
    assert not {"hiera", "timm", "torchvision", "lightning", "pytorch_lightning"} & set(sys.modules)
        """
        + STEP
        + """
    assert not {"timm", "timm.models.layers", "torchvision", "lightning"} & set(sys.modules)
    assert hiera_optim.import_hiera() is sys.modules["hiera"]
    """
    )


def test_a_step_without_timm_torchvision_lightning_or_the_hub() -> None:
    python(
        STEP,
        "timm",
        "torchvision",
        "lightning",
        "pytorch_lightning",
        "huggingface_hub",
        "packaging",
    )


def test_lightnings_names_say_what_is_missing() -> None:
    python(
        """
        import hiera_optim
        assert "feed_batch" in hiera_optim.__all__
        try:
            hiera_optim.MAEStaticInputsCallback
        except ModuleNotFoundError as error:
            assert "lightning" in str(error)
        else:
            raise SystemExit("no error")
        try:
            hiera_optim.nonsense
        except AttributeError as error:
            assert "nonsense" in str(error)
        """,
        "lightning",
        "pytorch_lightning",
    )


def test_a_hiera_that_is_imported_already_is_kept() -> None:
    from hiera_optim import import_hiera

    first = import_hiera()
    assert import_hiera() is first is sys.modules["hiera"]
