"""k8s/ and slurm/train.sbatch: the renderers' output for the base configuration, and overlays of it.

`python -m service.cluster.kustomize DIRECTORY` writes them; a test compares. An overlay is the difference
between two renderings as JSON patches, so that it can be read and changed by hand like any other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from service.cluster import kubernetes, slurm
from service.cluster.job import Job, make_job
from service.config.load import load_config

BASE_NODES = 2
"""Nodes of the shipped files: the least that shows how nodes meet."""

OVERLAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "h100-8": (
        "Nodes of eight H100 with InfiniBand.",
        ("cluster.node_type=h100-8", "cluster.network=infiniband"),
    ),
    "gh200-4": (
        "Nodes of four GH200 (arm64) with Slingshot, which needs the plugin in the image.",
        ("cluster.node_type=gh200-4", "cluster.network=slingshot", "cluster.nodes=4"),
    ),
    "cpu-smoke": (
        "Two pods without GPUs or volumes that train a tiny model for some steps: does this cluster work?",
        (
            *("cluster.gpus_per_node=0", "runtime.device=cpu", "run.name=hiera-base"),
            *("cluster.kubernetes.data_claim=null", "cluster.kubernetes.runs_claim=null"),
            *("cluster.kubernetes.resources={cpu: '1', memory: 2Gi}", "cluster.kubernetes.shm_size=256Mi"),
            *("data.kind=synthetic", "data.synthetic_samples=256", "data.threads=1"),
            *("model.input_size=64,64", "model.embed_dim=16", "model.stages=1,1,1,1"),
            *("model.decoder_embed_dim=32", "model.decoder_depth=1", "model.decoder_num_heads=2"),
            *("train.global_batch=16", "train.steps=50", "train.log_every=10", "optim.warmup_steps=10"),
        ),
    ),
}


def base_job() -> Job:
    """The shipped base configuration on BASE_NODES nodes."""
    return make_job(load_config("base"), nodes=BASE_NODES)


def overlay_job(name: str) -> Job:
    """The configuration of an overlay."""
    settings = OVERLAYS[name][1]
    nodes = None if any(setting.startswith("cluster.nodes=") for setting in settings) else BASE_NODES
    return make_job(load_config("base", settings), nodes=nodes)


def files() -> dict[str, str]:
    """All generated files by their path in the repository."""
    found = {"slurm/train.sbatch": slurm.render(base_job())}
    base = kubernetes.manifests(base_job())
    by_file: dict[str, list[kubernetes.Manifest]] = {}
    for manifest in base:
        by_file.setdefault(f"{manifest['kind'].lower()}.yaml", []).append(manifest)
    for name, manifests in by_file.items():
        found[f"k8s/base/{name}"] = "---\n".join(map(kubernetes.dump, manifests))
    found["k8s/base/kustomization.yaml"] = _kustomization(
        "hiera-base on two nodes of eight GPUs, rendered by hiera-train.", {"resources": list(by_file)}
    )
    image = {"name": "hiera-train", "newName": "hiera-train", "newTag": "latest"}
    found["k8s/kustomization.yaml"] = _kustomization(
        "kubectl apply -k k8s/; set your image here, or take an overlay: kubectl apply -k k8s/overlays/h100-8",
        {"resources": ["base"], "images": [image]},
    )
    for name, (about, _) in OVERLAYS.items():
        found.update(_overlay(name, about, base))
    return found


def _overlay(name: str, about: str, base: list[kubernetes.Manifest]) -> dict[str, str]:
    wanted = {_key(manifest): manifest for manifest in kubernetes.manifests(overlay_job(name))}
    found: dict[str, str] = {}
    patches: list[dict[str, Any]] = []
    for manifest in base:
        kind, object_name = _key(manifest)
        target = {"kind": kind, "name": object_name}
        other = wanted.pop((kind, object_name), None)
        if other is None:
            body = {"$patch": "delete", "apiVersion": manifest["apiVersion"], "kind": kind}
            patches.append({"patch": kubernetes.dump({**body, "metadata": {"name": object_name}})})
        elif changes := list(difference(manifest, other)):
            found[f"k8s/overlays/{name}/{kind.lower()}.yaml"] = kubernetes.dump(changes)
            patches.append({"path": f"{kind.lower()}.yaml", "target": target})
    assert not wanted, f"an overlay adds objects: {list(wanted)}"
    image = {"name": "hiera-train", "newName": "hiera-train", "newTag": "latest"}
    found[f"k8s/overlays/{name}/kustomization.yaml"] = _kustomization(
        about, {"resources": ["../../base"], "images": [image], "patches": patches}
    )
    return found


def _key(manifest: kubernetes.Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _kustomization(about: str, content: dict[str, Any]) -> str:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return f"# {about}\n{kubernetes.dump({**head, **content})}"


def difference(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """JSON patch (RFC 6902) from one value to another; lists of other lengths are replaced whole."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [change for index, pair in pairs for change in difference(*pair, f"{path}/{index}")]
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [{"op": "replace", "path": path, "value": new}]
    changes: list[dict[str, Any]] = []
    for key in [*old, *(key for key in new if key not in old)]:
        place = f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
        if key not in new:
            changes.append({"op": "remove", "path": place})
        elif key not in old:
            changes.append({"op": "add", "path": place, "value": new[key]})
        else:
            changes += difference(old[key], new[key], place)
    return changes


def main() -> None:
    """Write the files below the directory that is the first argument."""
    for name, text in files().items():
        path = Path(sys.argv[1]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
