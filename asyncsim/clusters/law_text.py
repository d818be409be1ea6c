"""How laws are written: ``name(parameter=value, ...)``, numbers, and lists that repeat and add.

Reading builds only what a table of dataclasses offers; no text is ever executed.
"""

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from asyncsim.errors import InputError, choices_like, require_choice, shown

#: A guard against ``[1] * 10**12``: more entries than any cluster has workers.
_LONGEST_LIST = 1_000_000
#: Characters of a part that are repeated without quotes.
_LONGEST_PART = 60
#: A number with a unit; not with an exponent.
_UNIT = re.compile(r"\d\s*(?!e[-+]?\d)[^\W\d_]", re.IGNORECASE)


def read(text: str, table: Mapping[str, type]) -> Any:
    """Return what a text stands for: a float, an instance of a class in ``table``, or a list of these.

    Parameters
    ----------
    text : str
        ``"gamma(mean=1, cv=0.2)"``, ``"0.005"`` or ``"[gamma(1, 0.2)] * 90 + [3] * 10"``.
    table : mapping of str to dataclass
        The classes by their lower-case names.

    Raises
    ------
    InputError
        If the text is anything else; from the class, if it refuses its parameters.
    """
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, table)
    except InputError:
        raise
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        unit = "; numbers have no unit, and times are in seconds" if _UNIT.search(text) else ""
        raise InputError(f"{shown(text)}: not a law; write for example gamma(mean=1, cv=0.2) or 0.005{unit}") from None


def write(value: Any) -> str:
    """Return the text of a number, a dataclass or a sequence; floats in their shortest exact form."""
    if dataclasses.is_dataclass(value):
        fields = (f"{f.name}={write(getattr(value, f.name))}" for f in dataclasses.fields(value))
        return f"{name_of(type(value))}({', '.join(fields)})"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(write, value))}]"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def name_of(kind: type) -> str:
    """Return the name that a class has on the command line."""
    return kind.__name__.lower()


def form_of(kind: type) -> str:
    """Return how a class is written, for messages: ``gamma(mean=..., cv=...)``."""
    return f"{name_of(kind)}({', '.join(f'{parameter}=...' for parameter in _parameters(kind))})"


def as_float(number: Any) -> float:
    """Return a number as a float, infinite where it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _evaluate(node: ast.expr, table: Mapping[str, type]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return as_float(number)
        case ast.Name(id="inf" | "nan" as name):  # refused later, by the law, with the parameter's name
            return float(name)
        case ast.Name(id=name):
            raise InputError(f"{name}: needs its parameters; write {form_of(_look_up(name, table))}")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            if isinstance(value := _evaluate(operand, table), float):
                return -value
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_evaluate(entry, table) for entry in entries]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _repeat(_evaluate(left, table), _evaluate(right, table), _unparsed(node))
        case ast.BinOp(op=ast.Add()):
            parts = [_evaluate(part, table) for part in _summands(node)]
            if all(isinstance(part, list) for part in parts):
                return list(itertools.chain.from_iterable(parts))
        case ast.Call(func=ast.Name(id=name)):
            return _build(_look_up(name, table), node, table)
    raise InputError(
        f"{_unparsed(node)}: not a law; write a number, name(parameter=value, ...) or [law] * count + [law] * count"
    )


def _unparsed(node: ast.expr) -> str:
    """Return the text of a part; in quotes, and cut, where it is long."""
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST_PART else shown(text)


def _summands(node: ast.expr) -> list[ast.expr]:
    """Return the parts of a sum in their order; in a loop, as there may be a thousand of them."""
    parts = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _build(kind: type, call: ast.Call, table: Mapping[str, type]) -> Any:
    name, parameters = name_of(kind), _parameters(kind)
    if len(call.args) > len(parameters):
        raise InputError(f"{name}: {len(call.args)} parameters given; write {form_of(kind)}")
    given = {p: _evaluate(arg, table) for p, arg in zip(parameters, call.args, strict=False)}
    for keyword in call.keywords:
        parameter = require_choice(f"{name}: parameter", keyword.arg or "**", parameters)
        if parameter in given:
            raise InputError(f"{name}: {parameter} is given twice; write {form_of(kind)}")
        given[parameter] = _evaluate(keyword.value, table)
    missing = [parameter for parameter in parameters if parameter not in given]
    if missing:
        raise InputError(f"{name}: {' and '.join(missing)} missing; write {form_of(kind)}")
    return kind(**given)


def _repeat(left: Any, right: Any, text: str) -> list:
    entries, count = (left, right) if isinstance(left, list) else (right, left)
    if not isinstance(entries, list) or not isinstance(count, float) or not count.is_integer() or count < 0:
        raise InputError(f"{text}: only a list can be repeated, a whole number of times: [law] * 10")
    if count * len(entries) > _LONGEST_LIST:
        raise InputError(f"{text}: more than {_LONGEST_LIST} entries; repeat fewer times")
    return entries * int(count)


def _look_up(name: str, table: Mapping[str, type]) -> type:
    if name.lower() not in table:
        raise InputError(f"{shown(name)}: unknown law; {choices_like(name, table)}")
    return table[name.lower()]


def _parameters(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]
