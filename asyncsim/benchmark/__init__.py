"""How fast simulation and replay are: what the study ``throughput`` measures, and what it measures them against.

`cases` says who runs in `turns`: the replay, the `gradients` alone, and the loops that one would write (`baselines`,
`pytorch`) on the same `tasks`. `machine` measures the ceilings and `memory` the memory; `bars` and `answer` hold the
ratios against targets.
"""
