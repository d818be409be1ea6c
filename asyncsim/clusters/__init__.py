"""Clusters: laws of times, the network, the server, and the policy by which workers wait.

This package contains no events and no gradients: a `cluster` is a value, and its `laws` and its
`policy` are values that can be written as texts.
"""
