"""Placing a run on a cluster: what Slurm and Kubernetes are sent, and torchx's front to submit and watch it.

`slurm` and `kubernetes` are pure renderers, configuration in, text out; they need neither torchx nor a
cluster. The schedulers for torchx send what they render.
"""
