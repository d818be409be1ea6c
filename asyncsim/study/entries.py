"""Methods and problems of a study: ``gem(kappa=2)``, ``mnist(network=mlp)``,
``mine.py:damped(patience=3)``.

Each entry is a call of a shipped factory or of a user's function. Arguments that it does not give
come from the study's options of the same names. Topologies, rules and attacks parse their own
texts; `from_file` calls a user's function.
"""

import dataclasses
import functools
import itertools
import math
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from asyncsim.base.calls import Call, bind, parameters_of, read, require_all, split, write
from asyncsim.base.console import note
from asyncsim.base.errors import InputError, require_choice, require_name, shown
from asyncsim.byzantine.aggregation import Rule
from asyncsim.byzantine.attacks import Attack
from asyncsim.clusters.topologies import Topology, adjacency
from asyncsim.methods import METHODS, Method, named_optimizer
from asyncsim.methods.named import OPTIMIZERS
from asyncsim.problems import PROBLEMS, Problem
from asyncsim.study.loading import OF_METHODS, OF_PROBLEMS, load_function, own_file, told_in_a_line

Product = TypeVar("Product", Method, Problem, Topology, Rule, Attack)
#: A call that returns each kind, for messages.
_EXAMPLES: Mapping[type, str] = {
    Method: "methods.gem()",
    Problem: "problems.custom()",
    Topology: "topologies.adjacency(matrix)",
    Rule: "aggregation.krum(f=1)",
    Attack: "attacks.alie(workers=1)",
}
#: Most combinations of the lists of one entry.
_MOST_VALUES = 1_000
#: The default name of `asyncsim.problems.custom`; a study names the problem after its function
#: instead.
_UNNAMED = "custom"
#: Letters that no file's name may have.
_UNFIT = re.compile(r"[/\\\\:*?\"<>|]+")


class Entry(NamedTuple):
    """A call that makes a method, a problem, ..."""

    text: str  #: as it was written, for messages
    function: Callable[..., Any]
    arguments: Mapping[str, Any]  #: as typed
    is_users: bool  #: whether the function is the user's


def entry_of(
    option: str, text: str, table: Mapping[str, Callable[..., Any]], kind: str = ""
) -> Entry:
    """Parse an entry; raise InputError for any other text.

    ``kind``: the type that a user's function returns, by default after the option.
    """
    subject = f"{option} = {shown(text)}"
    file, rest = own_file(text)
    if not file and rest.partition("(")[0].endswith(".py"):
        raise InputError(f"{subject}: is a file; name its function, too: {text}:FUNCTION")
    if not file and ":" in rest.partition("(")[0]:
        raise InputError(f"{subject}: write FILE.py:FUNCTION for one of your own")
    try:
        example = "gem(kappa=2)" if option == "methods" else "digits(batch_size=8)"
        call = (
            Call(rest)
            if rest.isidentifier()
            else read(rest, f"a {option.removesuffix('s')}", example)
        )
    except InputError as error:
        if "(" not in rest:
            require_choice(option, rest, table)
        raise InputError(
            f"{subject}: {error}; texts that are no names are written in quotes"
        ) from None
    if not isinstance(call, Call):
        raise InputError(
            f"{subject}: not a {option.removesuffix('s')}; write a name, and its arguments in "
            "brackets"
        )
    if file:
        kind = kind or ("Method" if option == "methods" else "Problem")
        function = load_function(option, text, file, call.name, kind)
    else:
        function = table[require_choice(option, call.name, table)]
    arguments = {
        name: _plain(value) for name, value in bind(call, function, subject, complete=False).items()
    }
    return Entry(text, function, arguments, bool(file))


def _plain(value: Any) -> Any:
    """Return an argument as its function takes it: names and calls, of policies for instance, as
    texts.
    """
    return (
        [_plain(entry) for entry in value]
        if isinstance(value, list)
        else str(value)
        if isinstance(value, Call)
        else value
    )


def _entry(option: str, item: Any, table: Mapping[str, Any], kind: Any) -> Entry:
    """Return the entry of a text; of an object from Python, an entry that returns it as it is."""
    if isinstance(item, kind):
        return Entry(item.name, lambda: item, {}, is_users=True)
    if isinstance(item, str):
        return entry_of(option, item, table)
    raise InputError(
        f"{option} = {item!r}: must be a name, or a {kind.__name__} that {_EXAMPLES[kind]} returns"
    )


def swept(entry: Entry) -> Iterator[Entry]:
    """Yield an entry for each value of the arguments that are lists, in all combinations."""
    values = [value if isinstance(value, list) else [value] for value in entry.arguments.values()]
    if not 0 < (count := math.prod(map(len, values))) <= _MOST_VALUES:
        raise InputError(
            f"methods = {shown(entry.text)}: {count:,} combinations of values; give 1 to "
            f"{_MOST_VALUES:,}"
        )
    for chosen in itertools.product(*values):
        yield entry._replace(arguments=dict(zip(entry.arguments, chosen, strict=True)))


def make_methods(
    options: Any, varied: Collection[str], changed: Callable[[str], bool]
) -> list[Method]:
    """Return the methods; print a note about options that some ignore; see
    `TaskOptions.make_methods`.
    """
    methods: list[tuple[Method, Mapping[str, Any]]] = []
    ignoring: dict[str, list[str]] = {}
    for item in split(options.methods):
        for entry in swept(_entry("methods", item, METHODS, Method)):
            method = _build("methods", entry, options, OF_METHODS, varied, changed, Method)
            require_name("method", method.name)
            methods.append((method, entry.arguments))
            # The momentum always counts: the recorded proxy has it, too.
            for name in OF_METHODS[:2]:
                if changed(name) and name not in parameters_of(entry.function):
                    ignoring.setdefault(name, []).append(method.name)
    if not methods:
        raise InputError(f"methods: none given; choose from {', '.join(METHODS)}")
    for name, names in ignoring.items():
        note(f"--{name.replace('_', '-')} changes nothing for {', '.join(dict.fromkeys(names))}")
    return _named_apart(methods)


def _named_apart(entries: Sequence[tuple[Method, Mapping[str, Any]]]) -> list[Method]:
    """Return the methods; methods of one name get the arguments that distinguish them into their
    names.
    """
    named = []
    for method, arguments in entries:
        alike = [values for candidate, values in entries if candidate.name == method.name]
        text = ",".join(
            f"{name}={_UNFIT.sub('-', write(value))}"
            for name, value in arguments.items()
            if any(values.get(name, values) != value for values in alike)
        )
        named.append(method._replace(name=f"{method.name}({text})") if text else method)
    names = [method.name for method in named]
    if len(set(names)) < len(names):
        raise InputError(
            f"methods = {', '.join(names)}: the same name twice; give each method once, or a name "
            "of its own "
            "from Python with method._replace(name=...)"
        )
    return named


def make_problem(options: Any, varied: Collection[str], changed: Callable[[str], bool]) -> Problem:
    """Return the problem; print a note about options that it ignores; see
    `TaskOptions.make_problem`.
    """
    entry = _entry("problem", options.problem, PROBLEMS, Problem)
    # The number of workers always counts, also the default.
    problem = _build("problem", entry, options, OF_PROBLEMS, {*varied, "workers"}, changed, Problem)
    if entry.is_users and problem.name == _UNNAMED:
        name = own_file(entry.text)[1].partition("(")[0].strip()
        problem = dataclasses.replace(problem, name=name)
    concentration = getattr(options, "split", None)
    if entry.is_users and concentration is not None and problem.split is None:
        config = {**problem.config, "split": concentration}
        problem = dataclasses.replace(problem, split=concentration, config=config)
    if (concentration is not None or "split" in varied) and problem.split != concentration:
        raise InputError(
            f"split = {concentration or 'none'}: problem = {entry.text!r} says its own, or "
            "cannot be split by class; choose digits, mnist or cifar10, without split in brackets, "
            "or a problem of yours whose train has a label"
        )
    is_varied = "batch_size" in varied or "batch_size" in parameters_of(entry.function)
    if changed("batch_size") and not is_varied:
        note(f"--batch-size changes nothing for {entry.text}")
    return problem


def from_file(option: str, value: Any, kind: Any, workers: int | None = None) -> Any:
    """Call the user's function that an option's text names; return any other value unchanged.

    ``kind``: the type of its result. A parameter ``workers`` of a topology's function is the
    cluster's. The same call of the same file returns the same object.

    Raises
    ------
    InputError
        The file or the function is missing, fails, or returns another type.
    """
    if not isinstance(value, str) or not own_file(value)[0]:
        return value
    function = entry_of(option, value, {}, kind.__name__).function
    return _from_file(function, option, value, kind, workers if kind is Topology else None)


@functools.lru_cache(64)  # compiled programs are cached by the identity of rules and attacks
def _from_file(
    function: Callable[..., Any], option: str, text: str, kind: Any, workers: int | None
) -> Any:
    entry = entry_of(option, text, {}, kind.__name__)
    options = types.SimpleNamespace(workers=workers)
    product: Any = _build(option, entry, options, ("workers",), ("workers",), bool, kind)
    if isinstance(product, adjacency) and product.label is None:
        product = dataclasses.replace(product, label=function.__name__)
    return product


def _build(
    option: str,
    entry: Entry,
    options: Any,
    names: Collection[str],
    varied: Collection[str],
    changed: Callable[[str], bool],
    kind: type[Product],
) -> Product:
    """Build the product of an entry; the study's options of these names are its other arguments.

    A user's function keeps its defaults, except for options that were chosen or that the study
    varies; a note lists defaults that differ from the study's.
    """
    subject = f"{option} = {shown(entry.text)}"
    parameters, arguments = parameters_of(entry.function), dict(entry.arguments)
    defaults = []
    for name in names:
        value = getattr(options, name, None)
        if name not in parameters or name in arguments or value is None:
            continue
        default = parameters[name].default
        if not entry.is_users or name in varied or changed(name):
            arguments[name] = value
        # Schedules and other objects cannot be compared or printed in short.
        elif isinstance(default, int | float | str) and default != value:
            defaults.append(f"{name} = {default!r} (the study's: {value!r})")
    if defaults:
        note(f"{entry.text} keeps its own {', '.join(defaults)}")
    require_all(arguments, entry.function, subject)
    if kind is Method and isinstance(arguments.get("rule"), str):
        arguments["rule"] = from_file("rule", arguments["rule"], Rule)
    if kind is Method and isinstance(arguments.get("optimizer"), str):
        rate = arguments.pop("learning_rate", options.learning_rate)
        require_choice("optimizer", arguments["optimizer"], OPTIMIZERS)
        if rate is None:
            raise InputError(
                f"optimizer = {arguments['optimizer']!r}: has no rate of its own; give "
                "learning_rate, too"
            )
        arguments["optimizer"] = named_optimizer(arguments["optimizer"], rate)
    try:
        product = entry.function(**arguments)
    except InputError as error:
        if str(error).partition(" ")[0] in entry.arguments:  # which of several entries
            raise InputError(f"{subject}: {error}") from None
        raise
    except (Exception, SystemExit) as error:
        if not entry.is_users:
            raise
        path = str(Path(own_file(entry.text)[0]).resolve())
        raise InputError(
            f"{subject}: cannot be made: {told_in_a_line(error, path)}; repair the file"
        ) from error
    if not isinstance(product, kind):
        raise InputError(
            f"{subject}: returned {product!r:.60}; must return {'an' if kind is Attack else 'a'} "
            f"{kind.__name__}, as {_EXAMPLES[kind]} does"
        )
    return product
