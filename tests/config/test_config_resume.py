"""Every field is decided: a change of it makes another run, or does not."""

# One setting a line is easier to read here.
# ruff: noqa: E501

from __future__ import annotations

import copy
import functools

import pytest

from service.config.load import known_fields, load_config
from service.config.resume import FREE, IDENTITY, changed_fields, describe_changes
from service.config.schema import RunConfig

# A valid other value for every field; {} settings that make the field matter.
OTHER = {
    "run.name": "other", "run.dir": "/other", "run.seed": 1,
    "model.input_size": (256, 256), "model.in_chans": 1, "model.embed_dim": 112, "model.num_heads": 2,
    "model.stages": (1, 2, 7, 2), "model.q_pool": 1, "model.q_stride": (4, 4), "model.mask_unit_size": (4, 4),
    "model.mask_unit_attn": (True, True, True, False), "model.patch_kernel": (4, 4), "model.patch_stride": (8, 8),
    "model.patch_padding": (2, 2), "model.mlp_ratio": 2.0, "model.drop_path_rate": 0.1, "model.sep_pos_embed": True,
    "model.decoder_embed_dim": 256, "model.decoder_depth": 4, "model.decoder_num_heads": 8, "model.mask_ratio": 0.75,
    "data.kind": "array", "data.path": "/other", "data.val_path": "/val", "data.val_fraction": 0.1,
    "data.crop_scale": (0.5, 1.0), "data.flip": False, "data.mean": (0.0, 0.0, 0.0), "data.std": (1.0, 1.0, 1.0),
    "data.threads": 1, "data.prefetch": 1, "data.max_bad_files": 0, "data.synthetic_samples": 10,
    "optim.name": "muon", "optim.base_lr": 1e-4, "optim.lr": 1e-3, "optim.min_lr": 1e-6, "optim.betas": (0.9, 0.999),
    "optim.eps": 1e-6, "optim.weight_decay": 0.1, "optim.warmup_epochs": 5, "optim.warmup_steps": 5,
    "optim.clip_grad_norm": 1.0, "optim.muon_lr": 0.01, "optim.muon_momentum": 0.9,
    "train.global_batch": 1024, "train.micro_batch": 8, "train.epochs": 800, "train.steps": 100,
    "train.init_from": "/other", "train.interpolate_position_embeddings": True,
    "train.precision": "fp32", "train.capture": "off", "train.eval_every": 5, "train.eval_samples": 5,
    "train.log_every": 5, "train.activation_checkpointing": "all", "train.reconstruct_every": 5,
    "checkpoint.every_steps": 5, "checkpoint.every_minutes": None, "checkpoint.keep": 5, "checkpoint.allow_changes": True,
    "runtime.device": "cpu", "runtime.nproc_per_node": 2, "runtime.allocator": "debug", "runtime.cache_dir": "/other",
    "runtime.cache_seed": "/other",
    "runtime.threads": 1, "runtime.numa": False, "runtime.max_restarts": 0, "runtime.grace_seconds": 5,
    "runtime.collective_timeout_seconds": 5, "metrics.enabled": False, "metrics.host": "127.0.0.1", "metrics.port": 0,
    "cluster.nodes": 2, "cluster.gpus_per_node": 4, "cluster.node_type": "gh200-4", "cluster.network": "tcp",
    "cluster.image": "hiera:1", "cluster.environment": {"A": "b"},
    "cluster.slurm.time": "1:00:00", "cluster.slurm.partition": "gpu", "cluster.slurm.account": "a", "cluster.slurm.qos": "q",
    "cluster.slurm.constraint": "c", "cluster.slurm.exclude": "n[1-2]", "cluster.slurm.reservation": "r",
    "cluster.slurm.mem": "0", "cluster.slurm.cpus_per_task": 4, "cluster.slurm.exclusive": False,
    "cluster.slurm.extra": ("--mail-type=END",), "cluster.slurm.venv": "/venv", "cluster.slurm.setup": ("true",),
    "cluster.slurm.container": "pyxis", "cluster.slurm.mounts": ("/a:/b",), "cluster.slurm.signal_seconds": 90,
    "cluster.slurm.max_requeues": 0, "cluster.slurm.max_failures": 0, "cluster.slurm.log_dir": "/logs",
    "cluster.kubernetes.namespace": "n", "cluster.kubernetes.image_pull_secrets": ("s",),
    "cluster.kubernetes.resources": {"cpu": "8"}, "cluster.kubernetes.gpu_resource": "amd.com/gpu",
    "cluster.kubernetes.node_selector": {"a": "b"}, "cluster.kubernetes.tolerations": (),
    "cluster.kubernetes.priority_class": "p", "cluster.kubernetes.service_account": "s", "cluster.kubernetes.queue": "q",
    "cluster.kubernetes.topology_key": "zone", "cluster.kubernetes.data_claim": None, "cluster.kubernetes.runs_claim": "r",
    "cluster.kubernetes.cache_claim": "c", "cluster.kubernetes.volumes": {"v": "/v"}, "cluster.kubernetes.create_claims": False,
    "cluster.kubernetes.storage_class": "s", "cluster.kubernetes.storage": "1Ti", "cluster.kubernetes.shm_size": "1Gi",
    "cluster.kubernetes.run_as_user": 54321, "cluster.kubernetes.retries": 0, "cluster.kubernetes.ttl_seconds": None,
    "cluster.kubernetes.pod_monitor": True,
}  # fmt: skip
MATTERS_WITH = {
    "train.interpolate_position_embeddings": {"train": {"init_from": "/weights.pth"}},
    "cluster.slurm.container": {"cluster": {"image": "hiera"}},
    "data.synthetic_samples": {"data": {"kind": "synthetic"}},
    "optim.muon_lr": {"optim": {"name": "muon"}},
    "optim.muon_momentum": {"optim": {"name": "muon"}},
}
IGNORED_WITH = {
    "train.interpolate_position_embeddings": {},
    "optim.base_lr": {"optim": {"lr": 1e-3}},
    "optim.warmup_epochs": {"optim": {"warmup_steps": 5}},
    "optim.muon_lr": {},
    "optim.muon_momentum": {},
    "train.epochs": {"train": {"steps": 100}},
    "data.path": {"data": {"kind": "synthetic"}},
    "data.val_path": {"data": {"kind": "synthetic"}},
    "data.val_fraction": {"data": {"val_path": "/val"}},
    "data.crop_scale": {"data": {"kind": "array"}},
    "data.flip": {"data": {"kind": "array"}},
    "data.synthetic_samples": {},
}


def pair(dotted, settings) -> tuple[RunConfig, RunConfig]:
    *sections, name = dotted.split(".")
    old = RunConfig.model_validate(settings)
    new = copy.deepcopy(settings)
    functools.reduce(lambda inner, section: inner.setdefault(section, {}), sections, new)[name] = OTHER[dotted]
    return old, RunConfig.model_validate(new)


def test_every_field_is_in_one_table():
    assert not set(IDENTITY) & set(FREE)
    assert sorted([*IDENTITY, *FREE]) == sorted(known_fields())
    assert list(IDENTITY) == [known for known in known_fields() if known in IDENTITY]
    assert set(OTHER) == set(known_fields())


@pytest.mark.parametrize("dotted", known_fields())
def test_a_change_is_reported_exactly_when_it_matters(dotted):
    old, new = pair(dotted, MATTERS_WITH.get(dotted, {}))
    assert old != new
    assert changed_fields(old, new) == ([dotted] if dotted in IDENTITY else [])
    assert changed_fields(new, old) == changed_fields(old, new)
    assert changed_fields(old, old) == []


@pytest.mark.parametrize(("dotted", "settings"), IGNORED_WITH.items())
def test_a_field_that_another_one_overrides_does_not_matter(dotted, settings):
    old, new = pair(dotted, settings)
    assert old != new
    assert changed_fields(old, new) == []


def test_changes_are_listed_with_their_values():
    old = load_config("base")
    new = load_config("tiny", ["train.steps=100", "train.log_every=1"])
    assert describe_changes(old, new) == [
        "model.stages: [2, 3, 16, 3] -> [1, 2, 7, 2]",
        "train.steps: null -> 100",
    ]
