"""Methods and problems from the options of a study: each factory is called with those that it has arguments for."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from asyncsim.errors import InputError, require_choice
from asyncsim.methods import METHODS, Method, named_optimizer
from asyncsim.methods.named import optimizers
from asyncsim.problems import PROBLEMS, Problem
from asyncsim.replays.method_check import check_fields
from asyncsim.study import own_file
from asyncsim.wording import note, split_names

if TYPE_CHECKING:
    from asyncsim.study.config import StudyOptions


#: What `asyncsim.problems.custom` calls a problem by default; a study calls it as the function that makes it.
_UNNAMED = "custom"
#: Whether an option was changed by the user of a study.
Changed = Callable[[str], bool]


def make_methods(options: "StudyOptions", swept: Collection[str], changed: Changed) -> list[Method]:
    """Return the methods, saying aloud which changed options some of them ignore; see `StudyOptions.make_methods`."""
    methods: list[Method] = []
    used: dict[str, set[str]] = {}
    for entry in split_names(options.methods):
        arguments: dict[str, Any] = {}
        if own_file.is_own("methods", entry):
            function, arguments = _own(options, "methods", entry, METHODS.values(), swept, changed)
            made = functools.partial(_call, options, function, arguments)
            entry = own_file.make("methods", entry, Method, "methods.gem()", made)
        elif isinstance(entry, str):
            factory = METHODS[require_choice("methods", entry, METHODS)]
            arguments = _arguments_of(options, factory)
            entry = _call(options, factory, arguments)
        if not isinstance(entry, Method):
            raise InputError(f"methods = {entry!r}: must be a name, or a Method that methods.gem() returns")
        check_fields(entry)
        methods.append(entry)
        used[entry.name] = set(arguments)
    if not methods:
        raise InputError(f"methods: none given; choose from {', '.join(METHODS)}")
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise InputError(
            f"methods = {', '.join(names)}: the same name twice; give each method once, or a name of its own "
            "from Python with method._replace(name=...)"
        )
    # The momentum is also that of the proxy that the replay keeps beside methods without one.
    _say_ignored(_options_of(METHODS.values()) - {"momentum"}, options, used, changed)
    return methods


def make_problem(options: "StudyOptions", swept: Collection[str], changed: Changed) -> Problem:
    """Return the problem, saying aloud which changed options it ignores; see `StudyOptions.make_problem`."""
    # The workers are the cluster's first of all, and no problem ignores them; and what a study varies, its user need
    # not have given.
    ignorable = _options_of(PROBLEMS.values()) - {"workers", *swept}
    if isinstance(options.problem, Problem):
        _say_ignored(ignorable, options, {options.problem.name: set()}, changed)
        return options.problem
    if not isinstance(options.problem, str):
        raise InputError(f"problem = {options.problem!r}: must be a name, or a Problem that problems.digits() returns")
    if own_file.is_own("problem", options.problem):
        # Each cluster has its workers, also where they are as many as by default.
        swept = {*swept, "workers"}
        function, arguments = _own(options, "problem", options.problem, PROBLEMS.values(), swept, changed)
        made = functools.partial(function, **arguments)
        problem = own_file.make("problem", options.problem, Problem, "problems.custom()", made)
        if problem.name == _UNNAMED:
            problem = dataclasses.replace(problem, name=options.problem.rpartition(":")[2])
    else:
        factory = PROBLEMS[require_choice("problem", options.problem, PROBLEMS)]
        arguments = _arguments_of(options, factory)
        problem = factory(**{name: value for name, value in arguments.items() if value is not None})
    _say_ignored(ignorable, options, {options.problem: set(arguments)}, changed)
    return problem


def factory_options() -> tuple[set[str], set[str]]:
    """Return the options that the shipped methods, and the shipped problems, are made from."""
    return _options_of(METHODS.values()) | {"methods"}, _options_of(PROBLEMS.values()) | {"problem"}


def _own(
    options: "StudyOptions",
    option: str,
    entry: str,
    factories: Iterable[Callable[..., Any]],
    swept: Collection[str],
    changed: Changed,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the user's own function that an entry names, and its arguments.

    Of the options that it has arguments for, and some shipped factory has, those that were changed or that a study
    varies.
    """
    function, known = own_file.load(option, entry), _options_of(factories)
    offered = {name: value for name, value in _arguments_of(options, function).items() if name in known}
    chosen = {name for name in offered if changed(name) or name in swept}
    return function, own_file.arguments(option, entry, function, offered, chosen)


def _arguments_of(options: "StudyOptions", factory: Callable[..., Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(options)}
    arguments = {name: getattr(options, name) for name in sorted(_options_of([factory]) & fields)}
    # A study may leave the rate to each method.
    if arguments.get("learning_rate", 0.0) is None:
        del arguments["learning_rate"]
    return arguments


def _call(options: "StudyOptions", factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Return what a method's factory makes of the options; a named optimizer takes the learning rate."""
    if arguments.get("optimizer") is None:
        return factory(**arguments)
    require_choice("optimizer", arguments["optimizer"], optimizers())
    if options.learning_rate is None:
        raise InputError(f"optimizer = {options.optimizer!r}: has no rate of its own; give learning_rate as well")
    given = {name: value for name, value in arguments.items() if name != "learning_rate"}
    return factory(**given | {"optimizer": named_optimizer(arguments["optimizer"], options.learning_rate)})


def _say_ignored(names: set[str], options: "StudyOptions", used: Mapping[str, set[str]], changed: Changed) -> None:
    """Say which options of these names were changed although some of the methods, or the problem, ignore them."""
    for field in dataclasses.fields(options):
        if field.name not in names or not changed(field.name):
            continue
        ignoring = [name for name, taken in used.items() if field.name not in taken]
        if ignoring:
            option = "--" + field.name.replace("_", "-")
            note(f"{option} changes nothing for {', '.join(ignoring)}")


def _options_of(factories: Iterable[Callable[..., Any]]) -> set[str]:
    # A policy is the cluster's; methods that need one name their own.
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = (one for factory in factories for one in inspect.signature(factory).parameters.values())
    return {one.name for one in parameters if one.kind in named} - {"policy"}
