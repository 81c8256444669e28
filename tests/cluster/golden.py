"""The configurations whose renderings are kept as golden files; `python -m tests.cluster.golden` renews them."""

from __future__ import annotations

from pathlib import Path

from service.cluster import kubernetes, slurm
from service.cluster.job import make_job
from service.config.load import load_config

DIRECTORY = Path(__file__).with_name("golden")

HOSTILE = 'it\'s "a" $HOME `id` \\ #1, %j;\n second'
"""What a shell, sbatch and YAML each have their own idea of."""

SLURM = {
    "gh200-slingshot-pyxis": (
        {"nodes": 4},
        (
            "cluster.node_type=gh200-4",
            "cluster.network=slingshot",
            "cluster.image=/images/hiera train.sqsh",
            "cluster.slurm.container=pyxis",
            "cluster.slurm.mounts=/scratch:/scratch,/opt/x:/opt/x:ro",
            "cluster.slurm.partition=gpu,long",
            "cluster.slurm.account=p1",
            "cluster.slurm.qos=high",
            "cluster.slurm.constraint=gh200&nvme",
            "cluster.slurm.exclude=n[1-3,7]",
            "cluster.slurm.reservation=may day",
            "cluster.slurm.time=2-00:00:00",
            "cluster.slurm.extra=--mail-type=END,--nice=5",
            "data.path=/data/imagenet",
            "run.dir=/scratch/runs/x",
            "runtime.cache_dir=/local/cache of us",
        ),
    ),
    "h100-apptainer-seeds": (
        {"nodes": 2, "seeds": (1, 2, 3), "after": "17", "name": "three seeds"},
        (
            "cluster.node_type=h100-8",
            "cluster.network=infiniband",
            "cluster.image=hiera.sif",
            "cluster.slurm.container=apptainer",
            "cluster.slurm.exclusive=false",
            "cluster.slurm.log_dir=/logs/100% of $$them",
            "run.dir=/runs/$$x y",
            "runtime.cache_dir=/local/it's",
        ),
    ),
    "cpu-hostile": (
        {"nodes": 1, "name": HOSTILE},
        (
            "cluster.gpus_per_node=0",
            "runtime.device=cpu",
            "cluster.slurm.time=null",
            "cluster.slurm.venv=/opt/it's a venv",
            "cluster.slurm.setup=module load 'x y'",
            "cluster.slurm.cpus_per_task=4",
            "cluster.slurm.mem=4G",
        ),
    ),
}
KUBERNETES = {
    "h100-everything": (
        {"nodes": 16, "name": "Run_1.5 of March"},
        (
            "cluster.node_type=h100-8",
            "cluster.network=efa",
            "cluster.image=registry.example/hiera:1.2",
            "cluster.kubernetes.namespace=research",
            "cluster.kubernetes.image_pull_secrets=one,two",
            "cluster.kubernetes.node_selector={pool: gpu}",
            "cluster.kubernetes.tolerations=nvidia.com/gpu:NoSchedule,team=vision:NoExecute,spot",
            "cluster.kubernetes.priority_class=high",
            "cluster.kubernetes.service_account=trainer",
            "cluster.kubernetes.queue=batch",
            "cluster.kubernetes.topology_key=topology.kubernetes.io/zone",
            "cluster.kubernetes.cache_claim=hiera-cache",
            "cluster.kubernetes.volumes={extra: /extra}",
            "cluster.kubernetes.storage_class=shared",
            "cluster.kubernetes.pod_monitor=true",
        ),
    ),
    "cpu-hostile": (
        {"nodes": 1, "name": HOSTILE},
        (
            "cluster.gpus_per_node=0",
            "runtime.device=cpu",
            "data.kind=synthetic",
            "metrics.port=0",
            "cluster.kubernetes.create_claims=false",
            "cluster.kubernetes.ttl_seconds=null",
        ),
    ),
}


def job(arguments, settings, environment=None):
    """The job of a case."""
    config = load_config("base", settings)
    if environment:
        cluster = config.cluster.model_copy(update={"environment": environment})
        config = config.model_copy(update={"cluster": cluster})
    return make_job(config, **arguments)


def renderings() -> dict[str, str]:
    """File name to text of all cases."""
    found = {}
    for name, (arguments, settings) in SLURM.items():
        environment = {"A": HOSTILE, "EMPTY": ""} if "hostile" in name else None
        found[f"slurm-{name}.sbatch"] = slurm.render(job(arguments, settings, environment))
    for name, (arguments, settings) in KUBERNETES.items():
        environment = {"A": HOSTILE, "EMPTY": ""} if "hostile" in name else None
        found[f"kubernetes-{name}.yaml"] = kubernetes.render(job(arguments, settings, environment))
    return found


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for name, text in renderings().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")
