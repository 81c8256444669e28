"""Optimizers over flat buffers: capturable in a CUDA graph, with state that does not depend on the layout."""

from hiera_optim.optim.adamw import AdamW, no_decay_parameters
from hiera_optim.optim.flat import Bucket, FlatOptimizer, FlatParameters
from hiera_optim.optim.muon import Muon, muon_parameters

__all__ = [
    "AdamW",
    "Bucket",
    "FlatOptimizer",
    "FlatParameters",
    "Muon",
    "muon_parameters",
    "no_decay_parameters",
]
