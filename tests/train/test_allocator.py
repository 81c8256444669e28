"""A worker finds out when torch's allocator does not run with the settings of its environment."""

import os
import subprocess
import sys

import pytest
import torch

from service.config.allocator import PRESETS
from service.errors import UserError
from service.launch.environment import ALLOCATOR_VARIABLES
from service.train.allocator import check_reported


def verify(settings, first="", **environment):
    """A fresh process, since torch reads its settings once; `first` runs before the check."""
    code = f"import torch; from service.train.allocator import verify_allocator\n{first}\nverify_allocator()"
    variables = dict.fromkeys(ALLOCATOR_VARIABLES, settings) | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("preset", ["large-batch", "debug", "default"])
def test_torch_runs_with_what_was_set(preset):
    answer = verify(PRESETS[preset])
    assert answer.returncode == 0, answer.stderr


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="before torch 2.12 the allocator tells it with a GPU only",
)
def test_a_torch_that_was_configured_otherwise_is_found_out():
    other = "torch._C._accelerator_setAllocatorSettings('max_split_size_mb:32')"
    answer = verify(PRESETS["large-batch"], first=other)
    assert "UserError: the allocator runs with 'max_split_size_mb:32'" in answer.stderr


def test_two_variables_that_differ_are_found_out():
    answer = verify("max_split_size_mb:64", PYTORCH_ALLOC_CONF="max_split_size_mb:32")
    assert "UserError: PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF differ" in answer.stderr


def test_the_setting_that_differs_is_named():
    reported = {"expandable_segments": False, "max_split_size": 512 * 1024 * 1024, "backend": "native"}
    check_reported("", reported)
    check_reported("max_split_size_mb:512,expandable_segments:False", reported)
    with pytest.raises(UserError, match="expandable_segments=False"):
        check_reported("expandable_segments:True", reported)
    with pytest.raises(UserError, match="max_split_size="):
        check_reported("max_split_size_mb:64", reported)
    with pytest.raises(UserError, match="backend=native"):
        check_reported("backend:cudaMallocAsync", reported)
