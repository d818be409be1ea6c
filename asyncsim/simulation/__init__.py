"""The event engine: from a cluster to a trace, on SimPy's clock.

`simulate` runs a `world` with a server, or `peers` without one. In a world workers make `journeys`
to a `station`, whose `gates` decide what becomes of their messages; the `weather` draws failures,
and `absences` are their consequences.
"""
