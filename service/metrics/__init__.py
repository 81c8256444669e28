"""Numbers of a run for Prometheus: the table of metrics, the worker's client and the node's endpoint."""
