"""Methods and problems from the options of a study: each factory is called with those that it has arguments for."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsim.errors import InputError, require_choice
from asyncsim.method_check import check_fields
from asyncsim.methods import METHODS, Method, named_optimizer
from asyncsim.methods.named import optimizers
from asyncsim.notes import note
from asyncsim.problems import PROBLEMS, Problem
from asyncsim.study import load_file, told_in_a_line
from asyncsim.study_config import split_names

if TYPE_CHECKING:
    from asyncsim.study_config import StudyOptions


def make_methods(options: "StudyOptions", swept: Collection[str]) -> list[Method]:
    """Return the methods, saying aloud which changed options some of them ignore; see `StudyOptions.make_methods`."""
    methods: list[Method] = []
    used: dict[str, set[str]] = {}
    for entry in split_names(options.methods):
        arguments = {}
        if _is_own(entry):
            factory = _own(entry)
            # Its own defaults stand; the options of methods that were changed, or that a study varies, reach it.
            offered = {
                name: value
                for name, value in _arguments_of(options, factory).items()
                if name in _options_of(METHODS.values())
            }
            arguments = {name: offered[name] for name in offered if options.changed(name) or name in swept}
            _require_defaults(entry, factory, arguments)
            _say_kept(entry, factory, {name: offered[name] for name in offered if name not in arguments})
            entry = _made(entry, functools.partial(_call, options, factory, arguments))
        elif isinstance(entry, str):
            if entry.endswith(".py"):
                raise InputError(f"methods = {entry!r}: is a file; name its function, too: {entry}:FUNCTION")
            if ":" in entry:
                raise InputError(f"methods = {entry!r}: write FILE.py:FUNCTION for a method of your own")
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
    # The momentum is also that of the proxy that the replay keeps beside methods without one, and a study may have
    # an alpha of its own for those of its methods that are elastic.
    _say_ignored(options, _options_of(METHODS.values()) - {"momentum", "alpha"}, used)
    return methods


def make_problem(options: "StudyOptions") -> Problem:
    """Return the problem, saying aloud which changed options it ignores; see `StudyOptions.make_problem`."""
    # The workers are the cluster's first of all, and no problem ignores them.
    ignorable = _options_of(PROBLEMS.values()) - {"workers"}
    if isinstance(options.problem, Problem):
        _say_ignored(options, ignorable, {options.problem.name: set()})
        return options.problem
    if not isinstance(options.problem, str):
        raise InputError(f"problem = {options.problem!r}: must be a name, or a Problem that problems.digits() returns")
    factory = PROBLEMS[require_choice("problem", options.problem, PROBLEMS)]
    arguments = _arguments_of(options, factory)
    _say_ignored(options, ignorable, {options.problem: set(arguments)})
    return factory(**{name: value for name, value in arguments.items() if value is not None})


def factory_options() -> tuple[set[str], set[str]]:
    """Return the options that the shipped methods, and the shipped problems, are made from."""
    return _options_of(METHODS.values()) | {"methods"}, _options_of(PROBLEMS.values()) | {"problem"}


def _is_own(entry: Any) -> bool:
    return isinstance(entry, str) and ".py:" in entry


def _own(entry: str) -> Callable[..., Any]:
    """Return the function that ``FILE.py:NAME`` names."""
    text, _, name = entry.rpartition(":")
    path = Path(text).absolute()
    if not path.is_file():
        raise InputError(f"methods = {entry!r}: there is no file {text}")
    try:
        module = load_file(f"asyncsim.own.{path.stem}", path)
    except (Exception, SystemExit) as error:
        raise InputError(f"methods = {entry!r}: cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        raise InputError(f"methods = {entry!r}: {text} has no function {name}")
    return getattr(module, name)


def _made(entry: str, make: Callable[[], Any]) -> Method:
    """Return the method that a function of the user's own makes."""
    try:
        method = make()
    except InputError:
        raise
    except Exception as error:
        path = str(Path(entry.rpartition(":")[0]).absolute())
        raise InputError(f"methods = {entry!r}: cannot be made: {told_in_a_line(error, path)}") from error
    if not isinstance(method, Method):
        raise InputError(f"methods = {entry!r}: returned {method!r}; must return a Method, as methods.gem() does")
    return method


def _say_kept(entry: str, factory: Callable[..., Any], offered: Mapping[str, Any]) -> None:
    """Say where a function's own defaults stand and are others than the study's."""
    own = {name: inspect.signature(factory).parameters[name].default for name in offered}
    # Others than numbers and texts, schedules say, cannot be compared or told in short.
    kept = [
        f"{name} = {own[name]!r} (the study's: {given!r})"
        for name, given in offered.items()
        if isinstance(own[name], int | float | str) and own[name] != given
    ]
    if kept:
        note(f"{entry} keeps its own {', '.join(kept)}")


def _require_defaults(entry: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise InputError(f"methods = {entry!r}: {error}; give every argument a default") from error


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


def _say_ignored(options: "StudyOptions", names: set[str], used: Mapping[str, set[str]]) -> None:
    """Say which options were changed although some of the methods, or the problem, ignore them."""
    for field in dataclasses.fields(options):
        if field.name not in names or not options.changed(field.name):
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
