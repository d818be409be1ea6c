"""A user's own problem, from functions and arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError
from asyncsim.base.tracing import naming, naming_failures, require_form, shapes_of, tree_text
from asyncsim.problems.data import require_labels
from asyncsim.problems.problem import (
    Problem,
    SplitLike,
    Tree,
    count_examples,
    mean_in_pieces,
    split_record,
)

_WIDEST = 8  # bytes of the widest number in JAX


def custom(
    init: Callable[[jax.Array], Tree],
    loss: Callable[..., Any],
    train: Tree = None,
    test: Tree = None,
    batch_size: int | None = None,
    evaluate: Callable[..., dict[str, jax.Array]] | None = None,
    init_state: Callable[[], Tree] | None = None,
    name: str = "custom",
    split: SplitLike = None,
    config: dict[str, Any] | None = None,
    predict: Callable[[Tree, Tree], jax.Array] | None = None,
    init_replica: Callable[[jax.Array, int], Tree] | None = None,
) -> Problem:
    """Return a user's own problem; any parameter tree, any data tree.

    The functions are traced by JAX. Floating-point parameters and arrays reach them in the run's
    precision, integers as they are.

    Parameters
    ----------
    init : callable
        ``init(key)`` returns the initial parameters, a tree of floating-point arrays. A draw
        without a dtype gives different numbers in float64 and float32; draw in ``jnp.float32`` to
        start both from the same values.
    loss : callable
        ``loss(params, batch, key)`` returns the mean loss of a minibatch, a scalar. With
        ``init_state``: ``loss(params, state, batch, key)`` returns the scalar and the new state.
        ``batch`` has the tree of ``train`` with ``batch_size`` examples in each array, or is None
        without data.
    train, test : tree of array_like, optional
        The examples, along the leading axis of every array; both of the same tree.
    batch_size : int, optional
        Examples a minibatch; needed with ``train``.
    evaluate : callable, optional
        ``evaluate(params, data)``, or ``evaluate(params, state, data)`` with ``init_state``,
        returns a dict of scalars with ``"loss"`` among them, over all examples of ``data``.
        Default: the mean loss, a thousand examples at a time, with a fixed key.
    init_state : callable, optional
        ``init_state()`` returns the initial state that is not trained. Each worker has its own,
        which no message carries; an evaluation sees their mean, and the first worker's integers.
    name : str
        Name of one line, for tables and file names.
    split : optional
        The examples that each worker draws from, see `Problem`: ``"even"``, a number (the
        concentration of class mixtures), a list with the indices of each worker's examples, or a
        function that returns one. Parts may overlap and differ in size; a worker goes through its
        part in epochs.
    config : dict, optional
        Further values for provenance; runs are saved with arrays as lists, and values unknown to
        JSON as text.
    predict : callable, optional
        ``predict(params, data)`` returns the scores of the classes before the softmax, shape
        ``[examples, classes]``; deterministic, and without the state of ``init_state``. The
        examples must be a dict with a ``"label"``, whole numbers from zero on. The study
        ``ensembles`` needs it.
    init_replica : callable, optional
        ``init_replica(key, worker)`` returns the initial parameters of a worker's replica, for
        methods with replicas; see `Problem`. It is called for each worker of a replay, untraced.

    Raises
    ------
    InputError
        For arrays that do not fit each other or the batch, or that JAX cannot represent; functions
        with wrong results; a name that is not valid for a folder, or a config that is no dict;
        parts that are no indices of examples.
    """
    if config is not None and not isinstance(config, Mapping):
        raise InputError(
            f"config = {config!r}: must be a dict, or another mapping, of values by name"
        )
    train, test = _as_arrays("train", train), _as_arrays("test", test)
    shapes, expected = _example_shapes(test), _example_shapes(train)
    if None not in (shapes, expected) and shapes != expected:
        raise InputError(f"test: has examples of shapes {shapes}, and train of {expected}")
    problem = Problem(
        name=name,
        init=init,
        loss=loss,
        evaluate=_evaluation(loss, evaluate, init_state is not None),
        train=train,
        test=test,
        batch_size=batch_size,
        init_state=init_state,
        split=split,
        predict=predict,
        init_replica=init_replica,
        config={"batch_size": batch_size, **split_record(split), **(config or {})},
    )
    _check_functions(problem, evaluate)
    return problem


def _evaluation(
    loss: Callable[..., Any], evaluate: Callable[..., Any] | None, stateful: bool
) -> Callable:
    """Return ``evaluate(params, state, data)``, from the user's function or else the mean loss."""
    if evaluate is not None:
        return evaluate if stateful else lambda params, state, data: evaluate(params, data)

    def mean_loss(params: Tree, state: Tree, data: Tree) -> dict[str, jax.Array]:
        key = jax.random.key(0)

        def means(part: Tree) -> dict[str, jax.Array]:
            return {
                "loss": loss(params, state, part, key)[0] if stateful else loss(params, part, key)
            }

        return means(None) if data is None else mean_in_pieces(means, data)

    return mean_loss


def _as_arrays(argument: str, data: Tree) -> Tree:
    if hasattr(data, "columns"):
        raise InputError(
            f"{argument}: is a {type(data).__name__}, whose columns a loss cannot name; give "
            "arrays, or a dict of them: {name: table[name].to_numpy() for name in table.columns}"
        )

    def convert(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > _WIDEST:
            raise InputError(
                f"{argument}: an array of {array.dtype}; must be of NumPy's real numbers, of at "
                "most 64 bits: convert it, for example with astype(np.float32)"
            )
        if not array.ndim:
            raise InputError(
                f"{argument}: needs arrays of examples, and has numbers, as lists have; give "
                "arrays instead"
            )
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    return jax.tree.map(convert, data)


def _example_shapes(data: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.shape[1:], data)


def _check_functions(problem: Problem, evaluate: Callable[..., Any] | None) -> None:
    """Check the results of the functions by tracing them, without computing.

    ``evaluate``: the user's, which the problem's calls.
    """
    key, data = jax.random.key(0), _shapes(problem.train)
    params = _traced("init(key)", problem.init, key)
    leaves = jax.tree.leaves(params)
    is_floating = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    if not is_floating or not any(leaf.size for leaf in leaves):
        raise InputError(
            "init: must return a tree of floating-point arrays with one or more elements, gave "
            f"{tree_text(params)}; untrained arrays belong to init_state, or to the closure of loss"
        )
    number = jax.ShapeDtypeStruct((), jnp.result_type(float))
    before: tuple[Any, ...] = (params,)
    names = "params"
    expected: Any = number
    if problem.init_state is not None:
        state = _traced("init_state()", problem.init_state)
        before, names, expected = (params, state), "params, state", (number, state)
    call = f"loss({names}, batch, key)"
    batch = _shapes(problem.train, problem.batch_size)
    require_form(call, _traced(call, problem.loss, *before, batch, key), expected)
    call = f"evaluate({names}, data)"
    if evaluate is not None:
        results = _traced(call, evaluate, *before, data)
    else:
        with naming_failures("loss of all examples, as there is no evaluate"):
            results = jax.eval_shape(problem.evaluate, params, (*before, None)[1], data)
    if (
        not isinstance(results, dict)
        or "loss" not in results
        or not all(map(_is_number, results.values()))
    ):
        raise InputError(
            f'{call}: must return a dict of scalars, real numbers, with "loss" among them, gave '
            f"{tree_text(results)}"
        )
    if problem.predict is not None:
        _check_predict(problem, params)


def _check_predict(problem: Problem, params: Tree) -> None:
    call = "predict(params, data)"
    if problem.train is None:
        raise InputError(
            "predict: there are no examples to predict; give train and test, or leave it out"
        )
    for argument, data in (("train", problem.train), ("test", problem.test)):
        if data is None:
            continue
        scores = _traced(call, problem.predict, params, _shapes(data))
        examples = count_examples(argument, data)
        if getattr(scores, "shape", ())[:-1] != (examples,) or not jnp.issubdtype(
            scores.dtype, jnp.floating
        ):
            raise InputError(
                f"{call} returned {tree_text(scores)}: must return floating-point scores, "
                f"[{examples}, classes]"
            )
        require_labels(argument, data, scores.shape[1])


def _traced(call: str, function: Any, *arguments: Any) -> Any:
    """Trace a function and return the shapes of its results; raise InputError if it fails."""
    scope = "from the key that init and loss are given"
    return _shapes(shapes_of(call, naming(call, function), *arguments, key=scope))


def _is_number(value: Any) -> bool:
    return getattr(value, "shape", None) == () and not jnp.issubdtype(
        value.dtype, jnp.complexfloating
    )


def _shapes(tree: Tree, examples: int | None = None) -> Tree:
    """Return shapes and dtypes as a replay has them, floats in JAX's default precision."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        kind = jnp.result_type(float) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        size = leaf.shape if examples is None else (examples, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(size, jax.dtypes.canonicalize_dtype(kind))

    return jax.tree.map(shape, tree)
