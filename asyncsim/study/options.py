"""The options of a study: the fields of its Config, read and explained by tyro.

The last value of an option counts. Options of a comparison may have several values; see
`asyncsim.study.sweep.ComparisonConfig`.
"""

import ast
import contextlib
import copy
import dataclasses
import inspect
import io
import itertools
import re
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    UnsupportedTypeAnnotationError,
)

from asyncsim.base.calls import split
from asyncsim.base.errors import InputError, require_choice, require_path
from asyncsim.study.config import CellConfig
from asyncsim.study.target import TargetOptions

_Value = TypeVar("_Value")
#: The annotation of a field that is no option.
Hidden = Annotated[_Value, tyro.conf.SuppressFixed, tyro.conf.Fixed]
#: The shared options in the short help.
_COMMON = {
    *("methods", "problem", "learning_rate", "seeds", "steps", "workers", "compute", "policy"),
    *("out", "resume", "target", "tune"),
}
#: A value that begins with a minus, unlike an option.
NEGATIVE = re.compile(r"-(?:[\d.].*|inf|nan)")
#: Numbers with commas between them, with or without the option's name.
_NUMBERS = re.compile(r"(?:(--[\w.-]+)=)?((?:-?[\d.][\d.e+-]*,)+-?[\d.][\d.e+-]*)")
_PARAGRAPH = "\n\n"
_TYPES = ConstructorRegistry()


@_TYPES.primitive_rule
def _none(kind: Any) -> PrimitiveConstructorSpec[None] | None:
    """Let ``none`` in any case stand for None."""
    if kind.type is not type(None):
        return None
    names = ("none", "None", "NONE")
    return PrimitiveConstructorSpec(
        1, "none", lambda texts: None, lambda value: value is None, lambda value: ["none"], names
    )


@_TYPES.primitive_rule
def _path(kind: Any) -> PrimitiveConstructorSpec[Path] | None:
    """Refuse an empty path, which pathlib takes for the working folder."""
    if kind.type not in (Path, Path | None):
        return None
    return PrimitiveConstructorSpec(
        1,
        "PATH",
        lambda texts: require_path("path", texts[0]),
        lambda value: value is None or isinstance(value, Path),
        lambda value: ["none" if value is None else str(value)],
    )


def read_options(name: str, study: ModuleType, typed: Sequence[str]) -> Any:
    """Return a study's config from its command line; raise InputError for options that cannot be
    read.

    ``-h`` and ``--help`` print the common options, or all, and raise SystemExit.
    """
    config, scales = study.Config, getattr(study, "SCALES", {})
    typed = split_numbers(typed)
    chosen = value_of("scale", typed) or value_of(getattr(config, "first", ""), typed)
    default, is_brief = scales.get(chosen), "-h" in typed
    about = study.__doc__ or ""
    about = f"{about.partition(_PARAGRAPH)[0]}\n--help lists all options." if is_brief else about
    notes = [getattr(config, "help_notes", "")]
    if notes[0]:
        tables = ("methods", "problems")
        notes += [f"{table.capitalize()}: {', '.join(names_of(table))}." for table in tables]
    example = f"example: asyncsim study {name} {getattr(config, 'example', '')}".rstrip()
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            options = tyro.cli(
                _with_marks(config, is_brief),
                prog=f"asyncsim study {name}",
                description=_PARAGRAPH.join([about, example, *([] if is_brief else notes)]),
                args=typed,
                registry=_TYPES,
                **({} if default is None else {"default": default}),
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise InputError(_in_a_line(box.getvalue(), name)) from None
    except (NameError, UnsupportedTypeAnnotationError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"study = {name!r}: its Config cannot be made into options: {reason}"
        ) from None
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(config)}
    return config(**values)


def _with_marks(config: type, is_brief: bool) -> Any:
    """Return a Config with tyro's marks: options that may have several values; for the short help
    first sentences, without the rare options.
    """
    shared = (*dataclasses.fields(CellConfig), *dataclasses.fields(TargetOptions))
    rare = {field.name for field in shared} - _COMMON | {"time_budget", "epochs", "gradients"}
    several, texts = getattr(config, "several", ()), texts_of(config) if is_brief else {}
    types = typing.get_type_hints(config, include_extras=True)
    marked = []
    for field in dataclasses.fields(config):
        kind: Any = types[field.name]
        metavar = None
        origins = [typing.get_origin(part) for part in typing.get_args(kind)]
        if field.name in several and tuple not in origins:
            kind, metavar = kind | tuple[kind, ...], "VALUE ..."
        marks = tyro.conf.arg(metavar=metavar)
        if is_brief:  # a line for each
            text = re.split(r"[.,;:] |[.]$", texts.get(field.name, ""))[0]
            marks = tyro.conf.arg(help=text, metavar="...", help_behavior_hint=_default_text)
        if is_brief and field.name in rare:
            kind = Annotated[kind, tyro.conf.Suppress]
        # A copy: dataclasses write the type into the field.
        marked.append((field.name, Annotated[kind, marks], copy.copy(field)))
    frozen = config.__dataclass_params__.frozen  # type: ignore[attr-defined]  # of every dataclass
    return dataclasses.make_dataclass("Options", marked, bases=(config,), frozen=frozen)


def _default_text(default: str) -> str:
    """Write the default of an option; nothing for one without."""
    return "" if default == "none" else f"(default: {default})"


def texts_of(config: type) -> dict[str, str]:
    """Return the texts below the fields of a dataclass and of its bases; empty for `Hidden`
    fields.
    """
    texts = {}
    for kind in reversed(config.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except OSError:  # a class of a notebook, for example
            continue
        for field, following in itertools.pairwise([*getattr(body[0], "body", []), None]):
            match field, following:
                case ast.AnnAssign(
                    target=ast.Name(id=name), annotation=ast.Subscript(value=ast.Name(id="Hidden"))
                ), _:
                    texts[name] = ""
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    texts[name] = " ".join(text.split())
    return texts


def _in_a_line(box: str, name: str) -> str:
    """Return the message in tyro's box in a line, with its remedy after a semicolon."""
    _, *lines = (line.strip("│ ") for line in box.strip().splitlines())
    sections = filter(None, re.split(r"(?:^|\n)[─-]{3,}(?:\n|$)", "\n".join(lines)))
    message, *remedies = (" ".join(text.partition(_PARAGRAPH)[0].split()) for text in sections)
    remedy = next(iter(remedies[:-1]), f"asyncsim study {name} --help explains the options")
    message = message.removeprefix("Error parsing ").rstrip(".")
    # Of an option with one value or several.
    message = re.sub(
        r"no type matching .*?([A-Z]{2,}).* could be instantiated from \[(.*)\]",
        r"\2 is no \1",
        message,
    )
    return f"{message}; {remedy.removeprefix('Argument helptext: ')}"


def refuse_unknown_names(config: Any) -> None:
    """Raise InputError for a misspelt method or problem, before importing them takes seconds."""
    for option, entries in (("methods", split(config.methods)), ("problem", [config.problem])):
        for entry in entries:
            if isinstance(entry, str) and entry.strip().isidentifier():
                require_choice(option, entry.strip(), names_of(f"{option.removesuffix('s')}s"))


def names_of(table: str) -> list[str]:
    """Return the names of all ``methods`` or ``problems``, without importing them."""
    path = Path(__file__).parent.parent / table / "__init__.py"
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(names := statement.value, ast.Dict):
            return [str(key.value) for key in names.keys if isinstance(key, ast.Constant)]
        if isinstance(statement, ast.AnnAssign) and isinstance(
            names := statement.value, ast.DictComp
        ):
            return [ast.unparse(name) for name in getattr(names.generators[0].iter, "elts", [])]
    return []


def value_of(name: str, typed: Sequence[str]) -> str:
    """Return the last value of an option; empty if the option was not typed."""
    values = [""]
    for text, following in itertools.pairwise([*typed, ""]):
        flag, equals, value = text.partition("=")
        if flag == f"--{name}":
            values.append(value if equals else following)
    return values[-1]


def split_numbers(typed: Sequence[str]) -> list[str]:
    """Split numbers with commas between them, as names may have."""
    parts: list[str] = []
    for text in typed:
        match = _NUMBERS.fullmatch(text)
        name, values = match.groups() if match else ("", text)
        parts += [name] if name else []
        parts += values.split(",") if match else [values]
    return parts
