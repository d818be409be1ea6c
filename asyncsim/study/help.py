"""The short help of a study: its common options, a line each.

tyro explains all options, but needs a tenth of a second; see `asyncsim.study.options`.
"""

import ast
import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncsim.study.config import CellConfig
from asyncsim.study.target import TargetOptions

#: The shared options in the short help.
_COMMON = {
    *("methods", "problem", "learning_rate", "seeds", "steps", "workers", "compute", "policy"),
    *("out", "resume", "target", "tune"),
}
#: The columns of a terminal of the usual width.
_COLUMNS = 80


def headings(name: str, study: ModuleType, about: str) -> str:
    """Return the lines above the options of a study: what it is about, and an example."""
    example = f"example: asyncsim study {name} {getattr(study.Config, 'example', '')}".rstrip()
    return f"{about}\n\n{example}"


def value_of(name: str, typed: Sequence[str]) -> str:
    """Return the last value of an option; empty if the option was not typed."""
    values = [""]
    for text, following in itertools.pairwise([*typed, ""]):
        flag, equals, value = text.partition("=")
        if flag == f"--{name}":
            values.append(value if equals else following)
    return values[-1]


def defaults_of(study: ModuleType, typed: Sequence[str]) -> Any:
    """Return the config of the typed scale, or else the class Config, with the default values."""
    scale = value_of("scale", typed) or value_of(getattr(study.Config, "first", ""), typed)
    return getattr(study, "SCALES", {}).get(scale, study.Config)


def short_help(name: str, study: ModuleType, typed: Sequence[str]) -> str:
    """Return the common options of a study, with the first sentence of their help and with
    defaults that fit into a line.
    """
    defaults = defaults_of(study, typed)
    shared = (*dataclasses.fields(CellConfig), *dataclasses.fields(TargetOptions))
    rare = {field.name for field in shared} - _COMMON | {"time_budget", "epochs", "gradients"}
    texts = texts_of(study.Config)
    options = [field.name for field in dataclasses.fields(study.Config) if field.name not in rare]
    width = max(map(len, options), default=0)
    about = (study.__doc__ or "").partition("\n\n")[0]
    lines = [f"usage: asyncsim study {name} [options]", ""]
    lines += [headings(name, study, f"{about}\n--help lists all options."), ""]
    for option in options:
        text = re.split(r"[.,;:] |[.]$", texts.get(option, ""))[0]
        line = f"  --{option.replace('_', '-'):<{width}}  {text}"
        default = _default_text(getattr(defaults, option, None))
        lines.append(line + default if len(line + default) <= _COLUMNS else line)
    return "\n".join(lines)


def _default_text(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return "" if value is None or value is False else f" (default: {text})"


def texts_of(config: type) -> dict[str, str]:
    """Return the texts below the fields of a dataclass and of its bases."""
    texts, classes = {}, functools.cache(_classes)
    for kind in reversed(config.__mro__[:-1]):
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        body = classes(file).get(kind.__name__, ()) if file else ()  # a notebook has no file
        for field, following in itertools.pairwise(body):
            match field, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    texts[name] = " ".join(text.split())
    return texts


def _classes(file: str) -> Mapping[str, list[ast.stmt]]:
    """Return the statements of the classes in a file, by their names."""
    tree = ast.parse(Path(file).read_bytes())
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
