"""Methods and problems of a study: ``gem(kappa=2)``, ``mnist(network=mlp)``, ``mine.py:damped(patience=3)``.

Each entry is a call of a shipped factory or of a function of the user's own. What it does not say itself, it has from
the study's options of the same names.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from asyncsim.base.calls import Call, bind, parameters_of, read, require_all, split, write
from asyncsim.base.console import note
from asyncsim.base.errors import InputError, require_choice, shown
from asyncsim.methods import METHODS, Method, named_optimizer
from asyncsim.methods.check import check_fields
from asyncsim.problems import PROBLEMS, Problem
from asyncsim.study.loading import OF_METHODS, OF_PROBLEMS, load_function, own_file, told_in_a_line

Made = TypeVar("Made", Method, Problem)
#: Entries that the lists of one entry may stand for.
_MOST_VALUES = 1_000
#: What `asyncsim.problems.custom` calls a problem by default; a study calls it as the function that makes it.
_UNNAMED = "custom"
#: Letters that no file's name may have.
_UNFIT = re.compile(r"[/\\\\:*?\"<>|]+")


class Entry(NamedTuple):
    """A call that makes a method or a problem."""

    text: str  #: as it was written, for messages
    function: Callable[..., Any]
    arguments: Mapping[str, Any]  #: those that it says itself
    own: bool  #: whether the function is the user's own


def entry_of(option: str, text: str, table: Mapping[str, Callable[..., Any]]) -> Entry:
    """Return the entry that a text is; raise InputError if it is none."""
    told = f"{option} = {shown(text)}"
    file, rest = own_file(text)
    if not file and rest.partition("(")[0].endswith(".py"):
        raise InputError(f"{told}: is a file; name its function, too: {text}:FUNCTION")
    if not file and ":" in rest.partition("(")[0]:
        raise InputError(f"{told}: write FILE.py:FUNCTION for one of your own")
    try:
        example = "gem(kappa=2)" if option == "methods" else "digits(batch_size=8)"
        call = Call(rest) if rest.isidentifier() else read(rest, f"a {option.removesuffix('s')}", example)
    except InputError as error:
        if "(" not in rest:
            require_choice(option, rest, table)
        raise InputError(f"{told}: {error}; texts that are no names are written in quotes") from None
    if not isinstance(call, Call):
        raise InputError(f"{told}: not a {option.removesuffix('s')}; write a name, and its arguments in brackets")
    if file:
        function = load_function(option, text, file, call.name, "Method" if option == "methods" else "Problem")
    else:
        function = table[require_choice(option, call.name, table)]
    given = {name: _plain(value) for name, value in bind(call, function, told, complete=False).items()}
    return Entry(text, function, given, bool(file))


def _plain(value: Any) -> Any:
    """Return an argument as its function takes it: names, and calls such as policies, as their texts."""
    return (
        [_plain(one) for one in value] if isinstance(value, list) else str(value) if isinstance(value, Call) else value
    )


def swept(entry: Entry) -> Iterator[Entry]:
    """Yield an entry for each value of the arguments that are lists, in all combinations."""
    values = [value if isinstance(value, list) else [value] for value in entry.arguments.values()]
    if (count := math.prod(map(len, values))) > _MOST_VALUES:
        raise InputError(f"methods = {shown(entry.text)}: {count:,} combinations; give at most {_MOST_VALUES:,}")
    for chosen in itertools.product(*values):
        yield entry._replace(arguments=dict(zip(entry.arguments, chosen, strict=True)))


def make_methods(options: Any, varied: Collection[str], changed: Callable[[str], bool]) -> list[Method]:
    """Return the methods, saying aloud which changed options some of them ignore; see `StudyOptions.make_methods`."""
    made: list[tuple[Method, Mapping[str, Any] | None]] = []
    ignoring: dict[str, list[str]] = {}
    for one in split(options.methods):
        several: list[Entry | None]
        if isinstance(one, str):
            several = list(swept(entry_of("methods", one, METHODS)))
            if not several:
                raise InputError(f"methods = {shown(one)}: a list of values is empty; give one or more")
        elif isinstance(one, Method):
            several = [None]
        else:
            raise InputError(f"methods = {one!r}: must be a name, or a Method that methods.gem() returns")
        for entry in several:
            method = one if entry is None else _made("methods", entry, options, OF_METHODS, varied, changed, Method)
            check_fields(method)
            made.append((method, None if entry is None else entry.arguments))
            taken = () if entry is None else parameters_of(entry.function)
            # The momentum is also that of the proxy that is recorded beside methods without one.
            for name in OF_METHODS[:2]:
                if changed(name) and name not in taken:
                    ignoring.setdefault(name, []).append(method.name)
    if not made:
        raise InputError(f"methods: none given; choose from {', '.join(METHODS)}")
    for name, methods in ignoring.items():
        note(f"--{name.replace('_', '-')} changes nothing for {', '.join(dict.fromkeys(methods))}")
    return _named_apart(made)


def _named_apart(made: list[tuple[Method, Mapping[str, Any] | None]]) -> list[Method]:
    """Return the methods, those of one name with the arguments in their names that set them apart."""
    named = []
    for method, given in made:
        alike = [other for one, other in made if one.name == method.name]
        if len(alike) > 1 and given is not None:
            others = [other or {} for other in alike]
            apart = {name: value for name, value in given.items() if any(o.get(name, o) != value for o in others)}
            text = ",".join(f"{name}={_UNFIT.sub('-', write(value))}" for name, value in apart.items())
            method = method._replace(name=f"{method.name}({text})" if text else method.name)
        named.append(method)
    names = [method.name for method in named]
    if len(set(names)) < len(names):
        raise InputError(
            f"methods = {', '.join(names)}: the same name twice; give each method once, or a name of its own "
            "from Python with method._replace(name=...)"
        )
    return named


def make_problem(options: Any, varied: Collection[str], changed: Callable[[str], bool]) -> Problem:
    """Return the problem, saying aloud which changed options it ignores; see `StudyOptions.make_problem`."""
    given = options.problem
    taken: Collection[str] = ()
    if isinstance(given, Problem):
        problem = given
    elif isinstance(given, str):
        entry = entry_of("problem", given, PROBLEMS)
        # Each cluster has its workers, also where they are as many as by default.
        problem = _made("problem", entry, options, OF_PROBLEMS, {*varied, "workers"}, changed, Problem)
        if entry.own and problem.name == _UNNAMED:
            problem = dataclasses.replace(problem, name=own_file(entry.text)[1].partition("(")[0].strip())
        taken = parameters_of(entry.function)
    else:
        raise InputError(f"problem = {given!r}: must be a name, or a Problem that problems.digits() returns")
    if "batch_size" not in taken and "batch_size" not in varied and changed("batch_size"):
        note(f"--batch-size changes nothing for {given if isinstance(given, str) else problem.name}")
    return problem


def _made(
    option: str,
    entry: Entry,
    options: Any,
    names: Collection[str],
    varied: Collection[str],
    changed: Callable[[str], bool],
    kind: type[Made],
) -> Made:
    """Return what an entry makes, with the study's options of these names for arguments that it does not say.

    A function of the user's own keeps its own defaults, but where the study's user chose others or the study varies
    them; where these differ from the study's, that is said aloud.
    """
    told = f"{option} = {shown(entry.text)}"
    parameters, arguments = parameters_of(entry.function), dict(entry.arguments)
    kept = []
    for name in names:
        value = getattr(options, name, None)
        if name not in parameters or name in arguments or value is None:
            continue
        default = parameters[name].default
        if not entry.own or name in varied or changed(name):
            arguments[name] = value
        # Others than numbers and texts, schedules say, cannot be compared or told in short.
        elif isinstance(default, int | float | str) and default != value:
            kept.append(f"{name} = {default!r} (the study's: {value!r})")
    if kept:
        note(f"{entry.text} keeps its own {', '.join(kept)}")
    require_all(arguments, entry.function, told)
    if isinstance(arguments.get("optimizer"), str):
        rate = arguments.pop("learning_rate", options.learning_rate)
        if rate is None:
            raise InputError(f"optimizer = {arguments['optimizer']!r}: has no rate of its own; give learning_rate, too")
        arguments["optimizer"] = named_optimizer(arguments["optimizer"], rate)
    try:
        made = entry.function(**arguments)
    except InputError as error:
        if str(error).partition(" ")[0] in entry.arguments:  # which of several entries
            raise InputError(f"{told}: {error}") from None
        raise
    except (Exception, SystemExit) as error:
        if not entry.own:
            raise
        path = str(Path(own_file(entry.text)[0]).resolve())
        raise InputError(f"{told}: cannot be made: {told_in_a_line(error, path)}") from error
    if not isinstance(made, kind):
        example = "methods.gem()" if kind is Method else "problems.custom()"
        raise InputError(f"{told}: returned {made!r}; must return a {kind.__name__}, as {example} does")
    return made
