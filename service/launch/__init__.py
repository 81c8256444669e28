"""Starting a run on a node: environment, rendezvous, torchrun, signals, restarts and the exit code."""
