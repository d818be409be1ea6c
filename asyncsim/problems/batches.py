"""Which examples every job's minibatches hold: drawn on the host, known before any gradient."""

from typing import Any

import numpy as np

from asyncsim.errors import InputError, require_count
from asyncsim.streams import Streams

_NOT_DRAWN = -1


class BatchIndices:
    """The example indices of every minibatch of every worker.

    A worker goes through its examples in epochs. Epoch ``e`` is a permutation from the named stream
    (seed, "batches", worker, block ``e``), cut into full batches; the examples that do not fill a last
    batch wait for the next epoch. So one seed gives a worker the same batches under every method and
    trace and, unless ``sharded``, next to any number of other workers.

    Parameters
    ----------
    seed : int
        The run's seed, zero or above.
    workers : int
        Number of workers.
    examples : int
        Number of training examples.
    batch_size : int
        Examples a minibatch.
    sharded : bool
        False: every worker shuffles the whole set. True: worker ``i`` shuffles its own shard, the
        examples ``i, i + workers, i + 2 workers, ...``: disjoint, and equal in size up to one example.
    remedy : str
        What else helps where shards are too small, for the message.

    Raises
    ------
    InputError
        A worker would have fewer examples than one batch holds.
    """

    def __init__(
        self,
        seed: int,
        workers: int,
        examples: int,
        batch_size: int,
        sharded: bool = False,
        remedy: str = "sharded=False",
    ):
        self._streams = Streams(require_count("seed", seed, minimum=0), "batches")
        require_count("workers", workers)
        self._stride = workers if sharded else 1
        self._examples = examples
        self._batch_size = batch_size
        # Worker i holds examples i, i + stride, ...; all hold every example when the stride is one.
        first = np.arange(workers) if sharded else np.zeros(workers, np.int64)
        self._shard_size = -(-(examples - first) // self._stride)
        if self._shard_size.min() < batch_size:
            raise InputError(
                f"batch_size = {batch_size}: the smallest of {workers} shards of {examples} examples has "
                f"{self._shard_size.min()}; use smaller batches, fewer workers or {remedy}"
            )
        self._batches = self._shard_size // batch_size
        self._epoch = np.full(workers, _NOT_DRAWN)
        # Each worker's current epoch; a row takes memory only once it is written.
        self._order = np.empty((workers, self._batches.max(), batch_size), np.int32)

    def rows(self, worker: Any, job: Any, window: int = 1, local_steps: Any = None) -> np.ndarray:
        """Return the example indices of some jobs' minibatches.

        Quickest when each worker's jobs are asked for in increasing order: one epoch a worker is kept.

        Parameters
        ----------
        worker, job : array_like of int, shape ``[jobs]``
            The worker of each job, and which of that worker's jobs it is, from 0.
        window : int
            Most local steps of a job.
        local_steps : array_like of int, shape ``[jobs]``, optional
            Those of each job, by default the window. The worker's step number is ``job * local_steps + step``; what is
            returned for steps beyond those of a job is the next one's.

        Returns
        -------
        int32 array, shape ``[jobs, window, batch_size]``
        """
        workers = np.asarray(worker)
        first = np.asarray(job) * (window if local_steps is None else np.asarray(local_steps))
        steps = first[:, None] + np.arange(window)
        epochs, batch = np.divmod(steps, self._batches[workers][:, None])
        rows = np.empty((*steps.shape, self._batch_size), np.int32)
        for epoch in np.unique(epochs):
            at = np.nonzero(epochs == epoch)
            self._draw(workers[at[0]], int(epoch))
            rows[at] = self._order[workers[at[0]], batch[at]]
        return rows

    def _draw(self, workers: np.ndarray, epoch: int) -> None:
        """Make ``epoch`` the current one of ``workers``."""
        for worker in np.unique(workers[self._epoch[workers] != epoch]).tolist():
            generator = self._streams.generator(worker, block=epoch)
            permutation = generator.permutation(int(self._shard_size[worker]))
            batches = int(self._batches[worker])
            order = permutation[: batches * self._batch_size].reshape(batches, self._batch_size)
            if self._stride > 1:
                order = worker + self._stride * order
            self._order[worker, :batches] = order
            self._epoch[worker] = epoch
