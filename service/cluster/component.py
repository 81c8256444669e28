"""torchx's component: `torchx run -s hiera_slurm hiera.train --config base --nodes 4 data.path=/imagenet`.

Only the component is in this module, and its annotations are no texts (no `from __future__`): torchx checks
every function here and evaluates the annotations itself.
"""

import torchx.specs as specs

from service.cluster import app, job
from service.config import load


def train(
    *overrides: str,
    config: str,
    nodes: int = 0,
    name: str = "",
    seeds: str = "",
    after: str = "",
) -> specs.AppDef:
    """Pre-train Hiera on some nodes.

    Args:
        overrides: settings as section.field=value
        config: YAML file, or the name of a shipped configuration
        nodes: number of nodes; 0: cluster.nodes of the configuration
        name: name of the job; default: run.name
        seeds: array of runs, one for each seed, e.g. 0,1,2 (Slurm)
        after: job that has to succeed first (Slurm)
    """
    wanted = job.make_job(
        load.load_config(config, overrides),
        nodes=nodes or None,
        name=name or None,
        seeds=tuple(int(seed) for seed in seeds.split(",")) if seeds else (),
        after=after or None,
    )
    return app.make_app(wanted, config, overrides)
