"""Clusters: laws of times, the network, the server, and the policy of who waits for whom.

No event and no gradient is here: a `cluster` is a value, and its `laws` and its `policy` are values that can be
written as texts.
"""
