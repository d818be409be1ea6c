"""A user's own problem, from functions and arrays."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncsim.base.errors import InputError
from asyncsim.base.tracing import naming_failures, shapes_of, tree_text
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
    _require_alike(train, test)
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
    if init_replica is not None:
        _require_call("init_replica", init_replica, "key, worker", None, 0)
    call = f"evaluate({_evaluated(init_state is not None)})"
    _check_functions(
        problem, call if evaluate is not None else "loss of all examples, as there is no evaluate"
    )
    return problem


def _evaluated(stateful: bool) -> str:
    """Return the arguments of a user's ``evaluate``, as text."""
    return "params, state, data" if stateful else "params, data"


def _evaluation(
    loss: Callable[..., Any], evaluate: Callable[..., Any] | None, stateful: bool
) -> Callable:
    """Return ``evaluate(params, state, data)``, from the user's function or else the mean loss."""
    if evaluate is not None:
        names = _evaluated(stateful)
        _require_call("evaluate", evaluate, names, *names.split())
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
            "arrays, or a dict of "
            "them: {name: table[name].to_numpy() for name in table.columns}"
        )

    def convert(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.dtype.kind not in "biuf":
            raise InputError(
                f"{argument}: an array of {array.dtype}; must be of NumPy's real numbers: convert "
                "it, for example "
                "with astype(np.float32)"
            )
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype.itemsize > _WIDEST:
            raise InputError(
                f"{argument}: an array of {array.dtype}, which JAX cannot hold; convert it, for "
                "example with "
                "astype(np.float64)"
            )
        return array

    arrays = jax.tree.map(convert, data)
    if isinstance(data, list | tuple) and not any(leaf.ndim for leaf in jax.tree.leaves(arrays)):
        raise InputError(
            f"{argument}: a {type(data).__name__} of numbers; give an array, or a tree of arrays"
        )
    if not all(leaf.ndim for leaf in jax.tree.leaves(arrays)):
        raise InputError(
            f"{argument}: needs arrays of examples, and has numbers, as lists have; give arrays "
            "instead"
        )
    return arrays


def _require_alike(train: Tree, test: Tree) -> None:
    if train is None or test is None:
        return
    if _tree(test) != _tree(train):
        raise InputError(f"test: its tree {_tree(test)} is not that of train, {_tree(train)}")
    for a, b in zip(jax.tree.leaves(train), jax.tree.leaves(test), strict=True):
        if a.shape[1:] != b.shape[1:]:
            raise InputError(
                f"test: examples of shape {b.shape[1:]}, those of train have {a.shape[1:]}"
            )


def _check_functions(problem: Problem, evaluation: str) -> None:
    """Check the results of the functions by tracing them, without computing.

    ``evaluation`` is the name of the problem's ``evaluate`` in errors.
    """
    params = _shapes(_traced("init", "key", problem.init, jax.random.key(0)))
    kinds = [leaf.dtype for leaf in jax.tree.leaves(params)]
    if not kinds or not all(jnp.issubdtype(kind, jnp.floating) for kind in kinds):
        raise InputError(
            f"init: must return a tree of floating-point arrays, gave {tree_text(params)}; "
            "untrained arrays belong "
            "to init_state, or to the closure of loss"
        )
    if not any(leaf.size for leaf in jax.tree.leaves(params)):
        raise InputError(
            f"init: must return parameters, gave arrays without elements, {tree_text(params)}; "
            "give one or more"
        )
    state = _shapes(_traced("init_state", "", problem.init_state)) if problem.init_state else None
    _check_loss(problem, params, state)
    with naming_failures(evaluation):
        results = jax.eval_shape(problem.evaluate, params, state, _shapes(problem.train))
    if (
        not isinstance(results, dict)
        or "loss" not in results
        or not all(map(_is_number, results.values()))
    ):
        raise InputError(
            'evaluate: must return a dict of scalars, real numbers, with "loss" among them, gave '
            f"{tree_text(results)}"
        )
    if problem.predict is not None:
        _check_predict(problem, problem.predict, params)


def _check_loss(problem: Problem, params: Tree, state: Tree) -> None:
    stateful = problem.init_state is not None
    before = (params, state) if stateful else (params,)
    batch = _shapes(problem.train, problem.batch_size)
    names = "params, state, batch, key" if stateful else "params, batch, key"
    value = result = _traced("loss", names, problem.loss, *before, batch, jax.random.key(0))
    if stateful:
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(
                f"loss: must return the scalar and the new state, gave {tree_text(result)}"
            )
        value, new_state = result
        if _tree(new_state) != _tree(state):
            raise InputError(
                f"loss: must return a state of the tree of init_state, gave {tree_text(new_state)}"
            )
        if not all(map(_alike, jax.tree.leaves(new_state), jax.tree.leaves(state))):
            raise InputError(
                "loss: must return a state of the shapes and types of init_state, "
                f"{tree_text(state)}, gave "
                f"{tree_text(new_state)}"
            )
    if _is_no_scalar(value):
        raise InputError(
            f"loss: must return a scalar, the minibatch's mean, gave {tree_text(value)}"
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise InputError(f"loss: must return a floating-point number, gave {tree_text(value)}")


def _check_predict(
    problem: Problem, predict: Callable[[Tree, Tree], jax.Array], params: Tree
) -> None:
    data_sets = {
        name: data
        for name, data in (("train", problem.train), ("test", problem.test))
        if data is not None
    }
    if not data_sets:
        raise InputError(
            "predict: there are no examples to predict; give train and test, or leave it out"
        )
    for argument, data in data_sets.items():
        scores = _traced("predict", "params, data", predict, params, _shapes(data))
        examples = count_examples(argument, data)
        if getattr(scores, "shape", ())[:-1] != (examples,) or not jnp.issubdtype(
            scores.dtype, jnp.floating
        ):
            raise InputError(
                f"predict: must return floating-point scores, [{examples}, classes], gave "
                f"{tree_text(scores)}"
            )
        label = data.get("label") if isinstance(data, dict) else None
        if not isinstance(label, np.ndarray) or label.ndim != 1 or label.dtype.kind not in "iu":
            raise InputError(
                f'{argument}: predict needs a dict with a "label" of each example, whole numbers; '
                "got "
                f"{tree_text(_shapes(data))}"
            )
        classes = scores.shape[1]
        if label.min() < 0 or label.max() >= classes:
            raise InputError(
                f"{argument}: labels from {label.min()} to {label.max()}, but predict returns "
                f"scores of {classes} "
                f"classes; number them from 0 to {classes - 1}"
            )


def _traced(argument: str, names: str, function: Any, *arguments: Any) -> Any:
    """Trace a function and return the shapes of its results; raise InputError if it fails."""
    _require_call(argument, function, names, *arguments)
    call = f"{argument}({names})"
    with naming_failures(call):
        return shapes_of(
            call, function, *arguments, key="from the key that init and loss are given"
        )


def _require_call(argument: str, function: Any, names: str, *values: Any) -> None:
    """Check that a function takes these arguments."""
    try:
        signature = inspect.signature(function)
    except TypeError:
        raise InputError(
            f"{argument} = {function!r}: must be a function, {argument}({names})"
        ) from None
    except ValueError:  # functions that are not written in Python
        return
    try:
        signature.bind(*values)
    except TypeError:
        raise InputError(
            f"{argument}: takes {signature}; it is called as {argument}({names})"
        ) from None


def _is_no_scalar(value: Any) -> bool:
    return getattr(value, "shape", None) != ()


def _is_number(value: Any) -> bool:
    return not _is_no_scalar(value) and not jnp.issubdtype(value.dtype, jnp.complexfloating)


def _alike(a: Any, b: Any) -> bool:
    """Compare shapes and types of two leaves; floating-point types get the run's precision."""
    floating = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in (a, b))
    return a.shape == b.shape and (floating or a.dtype == b.dtype)


def _tree(data: Tree) -> Any:
    return jax.tree.structure(data)


def _shapes(tree: Tree, examples: int | None = None) -> Tree:
    """Return shapes and dtypes as a replay has them, floats in JAX's default precision."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        kind = jnp.result_type(float) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        size = leaf.shape if examples is None else (examples, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(size, jax.dtypes.canonicalize_dtype(kind))

    return jax.tree.map(shape, tree)
