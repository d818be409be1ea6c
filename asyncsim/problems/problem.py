"""A learning problem: initial parameters, loss, data and evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax

from asyncsim.base.console import counted
from asyncsim.base.errors import (
    InputError,
    require_choice,
    require_count,
    require_list,
    require_name,
    require_positive,
)
from asyncsim.base.streams import Streams

#: Any nesting of dicts, lists, tuples and registered containers of arrays.
Tree = Any

#: See `Problem.split`.
SplitLike = float | str | Sequence[Any] | Callable[[int, int], Sequence[Any]] | None

#: Examples evaluated at a time: bounds the memory of a pass over a large set.
EVALUATION_PIECE = 1000


@dataclass(frozen=True, eq=False)
class Problem:
    """A learning problem; it knows nothing of workers, delays or staleness.

    The replay casts floating-point leaves of the parameters and the data to the run's precision, so
    ``loss`` and ``evaluate`` follow the dtype of their arguments.

    Attributes
    ----------
    name : str
        Short name of one line, for tables and file names.
    config : dict
        The problem's settings, as JSON values, for provenance.
    init : callable
        ``init(key)`` returns the initial parameters, any tree of floating-point arrays.
    loss : callable
        ``loss(params, batch, key)`` returns the mean loss of a minibatch, a scalar. With
        ``init_state``: ``loss(params, state, batch, key)`` returns the scalar and the new state.
    train, test : tree of numpy arrays, or None
        The examples, along the leading axis that all leaves share. Without ``train`` the ``batch``
        is None.
    batch_size : int or None
        Examples a minibatch; None without ``train``.
    evaluate : callable
        ``evaluate(params, state, data)`` returns a dict of scalars, ``"loss"`` at least, over all
        examples of ``data``; deterministic. ``state`` is None without ``init_state``.
    init_state : callable or None
        ``init_state()`` returns the initial state that is not trained (such as running means), any
        tree. Each worker has its own, which no message carries. An evaluation sees their mean, and
        the first worker's integers.
    split : float, str, list, callable or None
        The examples that each worker draws from. None: all of them. ``"even"``: disjoint parts,
        example ``k`` for worker ``k % workers``. A number: disjoint parts whose mixtures of classes
        have this concentration, the smaller, the more different; see `dirichlet_shards`. A run's
        seed draws them, and ``train`` must be a dict with a ``"label"``. A list: the indices of
        each worker's examples. A function ``split(workers, seed)`` returns such a list.
    predict : callable or None
        ``predict(params, data)`` returns the scores of the classes before the softmax, shape
        ``[examples, classes]``, of examples with a ``"label"``; deterministic. None for problems
        without classes or without such a function.
    init_replica : callable or None
        ``init_replica(key, worker)`` returns the initial parameters of a worker's replica, a tree
        like ``init``'s; ``key`` is ``init``'s, the same for all workers. For methods
        with replicas: elastic averaging, LSGD, Parle, gossip. The central variable starts at the
        replicas' mean, and other methods start from it. None: all workers start from ``init``.
    """

    name: str
    init: Callable[[jax.Array], Tree]
    loss: Callable[..., Any]
    evaluate: Callable[[Tree, Tree, Tree], dict[str, jax.Array]]
    train: Tree = None
    test: Tree = None
    batch_size: int | None = None
    init_state: Callable[[], Tree] | None = None
    split: SplitLike = None
    predict: Callable[[Tree, Tree], jax.Array] | None = None
    init_replica: Callable[[jax.Array, int], Tree] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        require_name("problem", self.name)
        if self.test is not None:
            count_examples("test", self.test)
        if self.train is None:
            if self.batch_size is not None or self.split is not None:
                raise InputError(
                    f"batch_size = {self.batch_size!r}, split = {self.split!r}: need train data"
                )
            return
        if self.batch_size is None:
            raise InputError("batch_size = None: say how many examples of train a minibatch takes")
        examples = count_examples("train", self.train)
        if not callable(self.split):
            self._parts(1, 0)
        if require_count("batch_size", self.batch_size) > examples:
            raise InputError(
                f"batch_size = {self.batch_size}: train has only {examples} examples; use a "
                "smaller batch_size"
            )

    def __repr__(self) -> str:
        parameters, examples = (
            counted(self.parameter_count, "parameter"),
            counted(self.examples, "example"),
        )
        return f"Problem({self.name!r}, {parameters}, {examples})"

    @property
    def examples(self) -> int:
        """Number of training examples; zero without data."""
        return 0 if self.train is None else count_examples("train", self.train)

    @property
    def shapes(self) -> Any:
        """Shapes and types of the initial parameters, a tree like theirs."""
        return jax.eval_shape(self.init, jax.random.key(0))

    @property
    def parameter_count(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes))

    def batch_indices(self, seed: int, workers: int) -> "BatchIndices | None":
        """Return the example indices of each worker's jobs; None for a problem without data."""
        if self.train is None or self.batch_size is None:
            return None
        parts = self._parts(require_count("workers", workers), seed)
        if len(parts) != workers:
            raise InputError(
                f"workers = {workers}: {self.name} is split for {len(parts)}; let its function "
                "split it for each of its argument workers"
            )
        return BatchIndices(seed, self.batch_size, parts)

    def _parts(self, workers: int, seed: int) -> Sequence[np.ndarray]:
        """Return the examples of each worker; raise InputError for an invalid split."""
        split, everything = self.split, np.arange(self.examples)
        if split is None:
            return [everything] * workers
        if isinstance(split, str):
            require_choice("split", split, ("even",))
            return [everything[worker::workers] for worker in range(workers)]
        if not isinstance(split, int | float):
            return _require_parts(split(workers, seed) if callable(split) else split, self.examples)
        label = self.train.get("label") if isinstance(self.train, dict) else None
        if label is None or np.ndim(label) != 1:
            raise InputError(
                f"split = {split}: {self.name} has no label of each example to split by; let train "
                'be a dict with a "label", or give lists of indices'
            )
        return dirichlet_shards(label, workers, require_positive("split", split), seed)

    def stateful_loss(
        self, params: Tree, state: Tree, batch: Tree, key: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """Compute the minibatch loss and the new state, with or without ``init_state``."""
        if self.init_state is None:
            return self.loss(params, batch, key), state
        return self.loss(params, state, batch, key)


def split_record(split: SplitLike) -> dict[str, Any]:
    """Return the entry of a config for a split: of lists their lengths; none without a split."""
    if split is None or isinstance(split, str | int | float) or callable(split):
        return {} if split is None else {"split": split}
    return {"split": [np.size(part) for part in require_list("split", split)]}


def _require_parts(parts: Any, examples: int) -> list[np.ndarray]:
    """Return parts as arrays; raise InputError unless each has different indices of examples."""
    arrays = [np.asarray(part) for part in require_list("split", parts)]
    for worker, indices in enumerate(arrays):
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise InputError(
                f"split[{worker}] = {indices!r:.60}: must be the indices of a worker's examples, "
                "as np.flatnonzero returns them"
            )
        outside = indices[(indices < 0) | (indices >= examples)]
        if len(outside):
            raise InputError(
                f"split[{worker}]: has example {outside[0]}; train has 0 to {examples - 1}"
            )
        if len(np.unique(indices)) < len(indices):
            raise InputError(f"split[{worker}]: has an example twice; give each once")
    return arrays


def count_examples(argument: str, data: Tree) -> int:
    """Return the length of the arrays' common leading axis; raise InputError if there is none."""
    leaves = jax.tree.leaves(data)
    lengths = sorted({np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in leaves})
    if not lengths or lengths[0] == 0:
        raise InputError(f"{argument}: needs at least one array, each with one or more examples")
    if len(lengths) > 1:
        shapes = ", ".join(str(np.shape(leaf)) for leaf in leaves)
        raise InputError(
            f"{argument}: arrays of shapes {shapes} do not hold the same number of examples"
        )
    return lengths[0]


def measures(problem: Problem) -> set[str]:
    """List the columns of a problem's evaluations: ``train_loss``, ``test_accuracy`` and so on."""
    state = problem.init_state() if problem.init_state else None
    data = {"train": problem.train} | ({} if problem.test is None else {"test": problem.test})
    return {
        f"{part}_{name}"
        for part in data
        for name in jax.eval_shape(problem.evaluate, problem.shapes, state, data[part])
    }


def mean_in_pieces(
    means: Callable[[Tree], dict[str, jax.Array]], data: Tree, piece: int = EVALUATION_PIECE
) -> dict[str, jax.Array]:
    """Average over all examples of ``data``, at most ``piece`` examples at a time.

    Parameters
    ----------
    means : callable
        Maps some of the examples to a dict of scalar means over them.
    data : tree of arrays
        The examples, along the leading axis.
    piece : int
        Examples a call of ``means``; the last call has the remainder.
    """
    examples = count_examples("data", data)
    pieces, rest = divmod(examples, piece)
    if not pieces:
        return means(data)
    covered = pieces * piece
    stacked = jax.tree.map(lambda a: a[:covered].reshape(pieces, piece, *a.shape[1:]), data)
    total = jax.tree.map(lambda mean: mean.mean(0), lax.map(means, stacked))
    if not rest:
        return total
    last = means(jax.tree.map(lambda a: a[covered:], data))
    share = rest / examples
    return jax.tree.map(lambda a, b: (1 - share) * a + share * b, total, last)


_NOT_DRAWN = -1


class BatchIndices:
    """The example indices of every minibatch of every worker.

    A worker goes through its examples in epochs. Epoch ``e`` is a permutation from the named stream
    (seed, "batches", worker, block ``e``), cut into full batches; examples beyond the last full
    batch are left out of that epoch. So one seed gives a worker the same batches under every method
    and trace and, unless they are split, with any number of workers.

    Parameters
    ----------
    seed : int
        The run's seed, zero or above.
    batch_size : int
    parts : list of int array
        The examples of each worker.
    """

    def __init__(self, seed: int, batch_size: int, parts: Sequence[np.ndarray]):
        self._streams = Streams(require_count("seed", seed, minimum=0), "batches")
        self._parts, self._batch_size, workers = parts, batch_size, len(parts)
        self._part_size = np.array([len(part) for part in parts])
        if self._part_size.min() < batch_size:
            raise InputError(
                f"batch_size = {batch_size}: the smallest of {workers} parts has "
                f"{self._part_size.min()} examples; use smaller batches, fewer workers, more "
                "examples or another split"
            )
        self._batches = self._part_size // batch_size
        self._epoch = np.full(workers, _NOT_DRAWN)
        # Each worker's current epoch; a row takes memory only once it is written.
        self._order = np.empty((workers, self._batches.max(), batch_size), np.int32)

    def rows(self, worker: Any, job: Any, window: int = 1, local_steps: Any = None) -> np.ndarray:
        """Return the example indices of some jobs' minibatches, int32, shape
        ``[jobs, window, batch_size]``.

        Fastest when each worker's jobs come in increasing order: one epoch a worker is stored.

        Parameters
        ----------
        worker, job : array_like of int, shape ``[jobs]``
            The worker of each job, and the job's number among that worker's jobs, from 0.
        window : int
            Largest number of local steps of a job.
        local_steps : array_like of int, shape ``[jobs]``, optional
            Local steps of each job, by default the window. The worker's step number is
            ``job * local_steps + step``; rows beyond a job's steps belong to its next job.
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
        """Shuffle the examples of ``workers`` for an epoch."""
        for worker in np.unique(workers[self._epoch[workers] != epoch]).tolist():
            generator = self._streams.generator(worker, block=epoch)
            permutation = generator.permutation(int(self._part_size[worker]))
            batches = int(self._batches[worker])
            order = permutation[: batches * self._batch_size].reshape(batches, self._batch_size)
            self._order[worker, :batches] = self._parts[worker][order]
            self._epoch[worker] = epoch


def dirichlet_shards(
    label: np.ndarray, workers: int, concentration: float, seed: int
) -> list[np.ndarray]:
    """Split examples among workers whose mixtures of classes are drawn from a Dirichlet
    distribution.

    Each worker has shares of the classes, ``q_i ~ Dirichlet(concentration, ..., concentration)``:
    near one class with 0.01, some of them with 0.1, about equal shares with 100. The workers, in
    random order, draw their examples by these shares without replacement; the share of an exhausted
    class goes to the others in proportion. Workers have the same number of examples up to one, so
    that the mean of their losses is the loss of all examples.

    All is drawn from the stream (seed, "dirichlet").

    Parameters
    ----------
    label : int array, shape ``[examples]``
    workers : int
    concentration : float
        Above zero.
    seed : int

    Returns
    -------
    list of int array
        The examples of each worker in increasing order. Each example belongs to one worker.

    References
    ----------
    Hsu, Qi and Brown 2019, "Measuring the effects of non-identical data distribution for federated
    visual classification", arXiv 1909.06335: there the concentration of a class is also multiplied
    by its share of examples.
    """
    generator = Streams(require_count("seed", seed, minimum=0), "dirichlet").generator(0)
    pools = [generator.permutation(np.flatnonzero(label == class_)) for class_ in np.unique(label)]
    shares = generator.dirichlet(
        np.full(len(pools), concentration), require_count("workers", workers)
    )
    remaining = np.array([len(pool) for pool in pools])
    shards = [np.empty(0, int)] * workers
    for worker in generator.permutation(workers).tolist():
        size, drawn = -(-(len(label) - worker) // workers), np.zeros_like(remaining)
        while missing := size - int(drawn.sum()):
            odds = np.where(drawn < remaining, shares[worker], 0)
            if not odds.sum() > 0:  # all of the worker's classes are exhausted
                odds = (remaining - drawn).astype(float)
            drawn = np.minimum(drawn + generator.multinomial(missing, odds / odds.sum()), remaining)
        remaining -= drawn
        shard = [
            pool[end : end + count]
            for pool, end, count in zip(pools, remaining, drawn, strict=True)
        ]
        shards[worker] = np.sort(np.concatenate(shard))
    return shards
