"""Traces: the order and the times of all server visits, simulated, prescribed or recorded.

A `trace` comes from a simulation, from a stated staleness (`prescription`) or from a recording
(`visits`); the rows of the first and the last are made by the same rules (`bookkeeping`). Its
`columns` are below all of these.
"""
