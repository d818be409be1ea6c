"""The options of a study, from the fields of its Config; errors name the option, the value and the
remedy.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from asyncsim.base.calls import split
from asyncsim.base.errors import InputError, nearest, require_choice, require_path, shown

#: A value that begins with a minus, unlike an option.
NEGATIVE = re.compile(r"-(?:[\d.].*|inf|nan)")
#: Numbers with commas between them, with or without the option's name.
_NUMBERS = re.compile(r"(?:(--[\w.-]+)=)?((?:-?[\d.][\d.e+-]*,)+-?[\d.][\d.e+-]*)")
_HIDDEN = object()
_Value = TypeVar("_Value")
#: The annotation of a field that is no option.
Hidden = Annotated[_Value, _HIDDEN]
_KINDS: dict[Any, str] = {int: "integer", float: "number", str: "text", Path: "path", bool: ""}
_UNIONS = (typing.Union, types.UnionType)


class Option(NamedTuple):
    """An option of a study.

    An annotation may be marked: with the name of its type, ``Annotated[str, "law"]``; with a tuple
    of further flags; or as `Hidden`.
    """

    name: str  #: of the field
    annotation: Any
    kind: str  #: the type in words: ``integer``, ``fifo|random``; empty for a switch
    text: str
    default: Any  #: `dataclasses.MISSING` if the option is required
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The option as it is typed."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def flags(self) -> list[str]:
        """Everything that may be typed for the option."""
        flags = [self.flag, *self.aliases]
        return flags if self.kind else [*flags, *(f"--no-{flag[2:]}" for flag in flags)]

    @property
    def several(self) -> bool:
        """Whether the option takes several values."""
        return typing.get_origin(_unmarked(self.annotation)) in (tuple, list)

    @property
    def optional(self) -> bool:
        """Whether ``none`` stands for None; a path may have that name."""
        annotation = self.annotation
        while typing.get_origin(annotation) is Annotated:
            annotation = annotation.__origin__
        parts = typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else ()
        return type(None) in parts and Path not in parts

    @property
    def form(self) -> str:
        """The option with its values: ``--seeds integer``."""
        return f"{self.flag} {self.kind}{' ...' if self.several else ''}"

    def read(self, texts: Sequence[str], negated: bool) -> Any:
        """Return the value of the option; raise InputError for texts that are none."""
        typed = f"{self.name} = {shown(' '.join(texts))}" if texts else self.name
        if not self.kind:
            if texts:
                raise InputError(
                    f"{typed}: takes no value; write {self.flag} or --no-{self.flag[2:]}"
                )
            return not negated
        if not self.several and len(texts) != 1:
            problem = "takes a single value" if texts else "has no value"
            raise InputError(f"{typed}: {problem}; write {self.form}")
        if self.optional and [text.casefold() for text in texts] == ["none"]:
            return None
        annotation = _unmarked(self.annotation)
        try:
            if not self.several:
                return _convert(annotation, texts[0])
            parts = typing.get_args(annotation)
            kinds = parts if Ellipsis not in parts and len(parts) > 1 else parts[:1] * len(texts)
            pairs = zip(kinds, texts, strict=True)
            return typing.get_origin(annotation)(_convert(kind, text) for kind, text in pairs)
        except ValueError:
            if "|" in self.kind:
                for text in texts:
                    require_choice(self.name, text, self.kind.split("|"))
        article = "an" if self.kind[0] in "aeiou" else "a"
        raise InputError(f"{typed}: must be {article} {self.kind}; write {self.form}")


def options_of(config: type, scale: Any = None) -> dict[str, Option]:
    """Return the options of a study by field, with the defaults of a ``scale`` if there is one.

    Raises InputError for a field whose type no text can be.
    """
    texts = _texts(config)
    try:
        annotations = typing.get_type_hints(config, include_extras=True)
        kinds = {field.name: _kind(annotations[field.name]) for field in dataclasses.fields(config)}
    except (TypeError, NameError) as error:
        raise InputError(
            f"study = {config.__module__.rpartition('.')[2]!r}: its Config cannot be made into "
            f"options: {error}; let "
            "each field be a number, a text, a switch, a path or a tuple of these"
        ) from error
    options = {}
    for field in dataclasses.fields(config):
        annotation = annotations[field.name]
        marks = getattr(annotation, "__metadata__", ())
        if not field.init or _HIDDEN in marks:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = default if scale is None else getattr(scale, field.name)
        aliases = tuple(itertools.chain(*(mark for mark in marks if isinstance(mark, tuple))))
        text = texts.get(field.name, "")
        options[field.name] = Option(
            field.name, annotation, kinds[field.name], text, default, aliases
        )
    return options


def read_options(name: str, study: ModuleType, typed: Sequence[str]) -> Any:
    """Return a study's config from its command line; raise InputError for options that cannot be
    read.
    """
    scale = scale_of(study, typed)
    options = options_of(study.Config)
    flags = {flag: option for option in options.values() for flag in option.flags}
    listed = f"asyncsim study {name} --help lists the options"
    values = {}
    for flag, texts in _typed(typed):
        option = flags.get(flag.replace("_", "-"))
        if not flag:
            raise InputError(f"{shown(texts[0])}: belongs to no option; {listed}")
        if option is None:
            match = nearest(flag, flags)
            hint = f"did you mean {match}? " if match else ""
            raise InputError(f"{flag}: unknown option of the study {name}; {hint}{listed}")
        values[option.name] = option.read(texts, negated=flag not in (option.flag, *option.aliases))
        if values[option.name] == Path() and texts == [
            ""
        ]:  # pathlib takes it for the working folder
            require_path(option.name, "")
    for option in options.values():
        if option.default is dataclasses.MISSING and option.name not in values:
            raise InputError(f"{option.name}: is required; write {option.form}")
    try:
        return study.Config(**values) if scale is None else dataclasses.replace(scale, **values)
    except InputError:
        raise
    except Exception as error:  # of the Config's own code
        raise InputError(
            f"study = {name!r}: its Config refuses the options: {error}; {listed}"
        ) from error


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


def scale_of(study: ModuleType, typed: Sequence[str]) -> Any:
    """Return the config that ``--scale`` chooses; None for an unknown scale, which reading the
    options refuses.
    """
    return getattr(study, "SCALES", {}).get(value_of("scale", typed))


def value_of(name: str, typed: Sequence[str]) -> str:
    """Return the last value of an option; empty if the option was not typed."""
    values = [text for flag, texts in _typed(typed) if flag == f"--{name}" for text in texts[:1]]
    return values[-1] if values else ""


def split_numbers(typed: Sequence[str]) -> list[str]:
    """Split numbers with commas between them, as names may have."""
    parts: list[str] = []
    for text in typed:
        match = _NUMBERS.fullmatch(text)
        name, values = match.groups() if match else ("", text)
        parts += [name] if name else []
        parts += values.split(",") if match else [values]
    return parts


def _typed(typed: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with its values; values before the first flag have an empty one."""
    flag = ""
    values: list[str] = []
    for text in typed:
        if text.startswith("-") and not NEGATIVE.fullmatch(text):
            if flag or values:
                yield flag, values
            flag, equals, value = text.partition("=")
            values = [value] if equals else []
        else:
            values.append(text)
    if flag or values:
        yield flag, values


def _kind(annotation: Any) -> str:
    """Return a type in words; raise TypeError for a type that no text can be."""
    for mark in getattr(annotation, "__metadata__", ()):
        if isinstance(mark, str):
            return mark
    if typing.get_origin(annotation) is Annotated:
        return _kind(annotation.__origin__)
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(_kind(part) for part in parts if part is not type(None)))
    if origin in (tuple, list) and typing.get_origin(parts[0]) not in (tuple, list):
        return _kind(parts[0])
    if annotation not in _KINDS:
        raise TypeError(f"cannot read a {getattr(annotation, '__name__', annotation)}")
    return _KINDS[annotation]


def _convert(annotation: Any, text: str) -> Any:
    """Return the value that a text stands for; raise ValueError if there is none."""
    annotation = _unmarked(annotation)
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        for part in parts:
            if str(part) == text or str(part) == "none" == text.casefold():
                return part
    if typing.get_origin(annotation) in _UNIONS:
        for part in parts:
            try:
                return _convert(part, text)
            except ValueError:
                continue
    if annotation is type(None) and text.casefold() == "none":
        return None
    if annotation not in _KINDS:
        raise ValueError(text)
    return annotation(text)


def _unmarked(annotation: Any) -> Any:
    """Return an annotation without its marks, and a sequence without ``| None``."""
    if typing.get_origin(annotation) is Annotated:
        return _unmarked(annotation.__origin__)
    if typing.get_origin(annotation) in _UNIONS:
        for part in typing.get_args(annotation):
            if typing.get_origin(_unmarked(part)) in (tuple, list):
                return _unmarked(part)
    return annotation


def _texts(config: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its bases."""
    texts = {}
    for kind in reversed(config.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except OSError:  # a class of a notebook, for example
            continue
        for field, following in itertools.pairwise(getattr(body[0], "body", [])):
            match field, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    texts[name] = " ".join(text.split())
    return texts
