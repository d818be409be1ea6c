"""Replay: the gradients of a trace, in batches that give exactly what a loop over its events gives.

From the outside in: `replay` (and `ensemble`) checks what it is given and chooses a way to compute it (`ways`);
`running` is the loop on the host, which takes pieces from the `plan` (cut by `waves`), starts them, and hands what
they recorded to the `recording`, of which a `run` is made. What is started is a program of one of three ways
(`programs`):

==============  ====================================================================================================
`kernel`        one compiled loop over `piece`s: the gradients of each, then its commits; on any number of devices
`halves`        two threads of a CPU, each with half of every vector
`dispatched`    a few commits a call: long vectors on a CPU
==============  ====================================================================================================

All three compute gradients by `local` and commit by `commits`, on the `replay_state`; `tuning` has the sizes that only
affect speed.
"""
