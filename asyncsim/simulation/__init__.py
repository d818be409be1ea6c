"""The event engine: from a cluster to a trace, with SimPy and without JAX.

`simulate` starts the `engine`, or under a timing policy the `policy_engine`; in both, workers wait at a `station`.
"""
