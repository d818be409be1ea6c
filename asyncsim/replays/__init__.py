"""The replay: the real gradients of a trace, in batches, with the results of an event loop.

From the outside in: `replay` and `ensemble` check their arguments; `tuning` chooses the form of
computing. `running` is the loop on the host: it takes chunks of pieces from the `plan` (cut by
`waves`), starts them, and hands their numbers to the `recording`. Commits are computed in `pieces`,
by the one `step` of a method and gradients from `local`; `look` repeats a commit now and then.

A *wave* is a run of commits that do not depend on each other; a *piece* is a part of it that is
computed together; a *chunk* is the pieces that one call of a compiled program runs.
"""
