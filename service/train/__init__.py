"""The trainer: what each worker process of a run does, from run.yaml to checkpoints."""
