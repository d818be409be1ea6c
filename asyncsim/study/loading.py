"""Files of studies, methods and problems: which there are, how they are imported, and recognised when a study goes on.

A study is a Python file with a docstring, a dataclass ``Config`` and a function ``run(config)``. The shipped ones are
in ``studies/`` beside the package (in a clone) or inside it (when installed); a user's own are in ``studies/`` of the
working folder. From Python::

    staleness = asyncsim.study.load("staleness")
    result = staleness.run(staleness.Config(workers=20))
"""

import __future__

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncsim.study.results as results
from asyncsim.base.calls import split
from asyncsim.base.errors import InputError, require_choice, shown
from asyncsim.base.files import open_file, require_plain, results_of

#: Options of a study that are arguments of its methods, and of its problem, where these do not say their own.
OF_METHODS = ("learning_rate", "optimizer", "momentum")
OF_PROBLEMS = ("batch_size", "workers", "dirichlet")
#: ``FILE.py:FUNCTION``, with arguments or without.
_OWN = re.compile(r"\s*([^(]+?\.py):(.*)", re.DOTALL)


def studies() -> dict[str, Path]:
    """Return the file of every study, by name: the shipped ones, then the working folder's own.

    A user's file never takes the place of a shipped study; see `hidden`.
    """
    return {**_own(), **_files(shipped("studies"))}


def hidden() -> dict[str, Path]:
    """Return the working folder's files that are not listed because a shipped study has their name."""
    ours = _files(shipped("studies"))
    return {name: path for name, path in _own().items() if name in ours and not path.samefile(ours[name])}


def shipped(name: str) -> Path:
    """Return the folder of the shipped ``studies`` or ``figures``: inside the installed package, or beside it."""
    package = Path(__file__).resolve().parent.parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def load(name: str, options_alone: bool = False) -> ModuleType:
    """Import a study; ``options_alone``: only its Config and SCALES, with what these need of its imports."""
    found = studies()
    path = found[require_choice("study", name, found)]
    try:
        if options_alone and (options := _options_of(name, path)) is not None:
            return options
        module = load_file(f"asyncsim.studies.{name}", path)
    except (Exception, SystemExit) as error:
        raise InputError(f"study = {name!r}: {path} cannot be imported: {told_in_a_line(error, path)}") from error
    missing = [needed for needed in ("Config", "run") if not callable(getattr(module, needed, None))]
    if missing:
        raise InputError(
            f"study = {name!r}: {path} has no {' and no '.join(missing)}; "
            "a study is a dataclass Config and a function run(config)"
        )
    return module


def _options_of(name: str, path: Path) -> ModuleType | None:
    """Return a module of a study's options, made without the rest of its file: none of its heavy imports is loaded.

    None if the file has statements at its top level whose effect on the options cannot be seen, or no study.
    """
    tree = ast.parse(path.read_bytes())
    docstring = ast.get_docstring(tree)
    statements = tree.body[docstring is not None :]
    kinds = ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef
    defined = {statement.name for statement in statements if isinstance(statement, ast.FunctionDef | ast.ClassDef)}
    if not {"Config", "run"} <= defined or not all(isinstance(statement, kinds) for statement in statements):
        return None
    needed = {"Config", "SCALES"}
    kept: list[ast.stmt] = []
    for statement in reversed(statements):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            aliases = statement.names
            statement.names = [alias for alias in aliases if (alias.asname or alias.name.partition(".")[0]) in needed]
            if statement.names:
                kept.append(statement)
        elif needed & _bound(statement):
            names = (node for node in _evaluated(statement) if isinstance(node, ast.Name))
            needed |= {name.id for name in names if isinstance(name.ctx, ast.Load)}
            kept.append(statement)
    module = ModuleType(f"asyncsim.options.{name}", docstring)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses look for the names of annotations
    body = ast.Module(kept[::-1], [])
    try:
        exec(compile(body, str(path), "exec", __future__.annotations.compiler_flag, dont_inherit=True), vars(module))
    except NameError:  # of a name that only running the Config's methods would need
        return None
    return module


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is evaluated when a file's options are made: not the methods of its classes, but for special ones."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef) and not child.name.startswith("__"):
            for part in child.decorator_list:
                yield from ast.walk(part)
        else:
            yield from _evaluated(child)


def own_file(text: str) -> tuple[str, str]:
    """Return the file of the user's own that an entry names, empty if it names none, and the rest of the entry."""
    found = _OWN.fullmatch(text)
    return (found[1], found[2].strip()) if found else ("", text.strip())


def load_function(option: str, entry: str, file: str, name: str, kind: str) -> Callable[..., Any]:
    """Return a function of a file, which returns something of a ``kind``; raise InputError if there is none."""
    told, path = f"{option} = {shown(entry)}", require_plain(Path(file)).resolve()
    if not path.is_file():
        raise InputError(f"{told}: there is no file {file}")
    # As of a script, what lies beside it can be imported; but never before what is installed, or from results.
    if str(path.parent) not in sys.path and results_of(path) is None:
        sys.path.append(str(path.parent))
    try:
        found = getattr(load_file(f"asyncsim.own.{path.stem}", path), name, None)
    except (Exception, SystemExit) as error:
        raise InputError(f"{told}: cannot be imported: {told_in_a_line(error, str(path))}") from error
    if found is None:
        raise InputError(f"{told}: {file} has no function {name}")
    if not callable(found):
        raise InputError(f"{told}: {name} is a {type(found).__name__}, must be a function that returns a {kind}")
    return found


def files_of(options: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the files of all ``FILE.py:FUNCTION`` in the values of options: option and sha256 by path."""
    found = {}
    for option, value in options.items():
        texts = [one for one in (value if isinstance(value, tuple | list) else (value,)) if isinstance(one, str)]
        for entry in dict.fromkeys([*texts, *split(texts)]):
            file, _ = own_file(entry)
            if file and require_plain(Path(file)).is_file():
                with open_file(Path(file)) as opened:
                    found[file] = option, sha256(opened.read())
    return found


def require_as_they_were(values: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError for a file in values of options that only a folder of results names, if it may be a stranger's.

    It is imported again only if its hash is that which is recorded and it lies outside the folder; or if it is typed.
    """
    recorded = results.config_of(folder).get(results.FILES)
    for file, (option, found) in files_of(values).items():
        if results_of(Path(file)) or results_of(Path(file).resolve()):
            why = "lies inside the results"
        elif not isinstance(recorded, dict) or file not in recorded:
            why = f"has no hash in {results.CONFIG}"
        elif recorded[file] != found:
            told = f"resume = {str(folder)!r}: {file} is not the file that it was"
            raise InputError(f"{told}; restore the file, or {results.ANEW}")
        else:
            continue
        raise InputError(
            f"resume = {str(folder)!r}: {file} {why}, so it is not run because {results.CONFIG} names it; give "
            f"--{option.replace('_', '-')} again if you trust it"
        )


def load_file(name: str, path: Path) -> ModuleType:
    """Import a Python file under a module name, once, or again if it has changed; no other than what is read here."""
    source = path.read_bytes()
    key = str(path), sha256(source)
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__asyncsim_key__", None) == key:
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    vars(module)["__asyncsim_key__"] = key
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def sha256(content: bytes) -> str:
    """Return the hash by which the content of a file is recognised."""
    return hashlib.sha256(content).hexdigest()


def told_in_a_line(error: BaseException, path: str | Path) -> str:
    """Return an error in one line, with the line of the file that led to it."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"


def _own() -> dict[str, Path]:
    return _files(Path.cwd() / "studies")


def _files(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}


class Unrecognised(Exception):
    """A function that is in no file."""


def recognised(value: Any) -> str | None:
    """Return a hash by which a method or a problem is recognised, also in another process.

    Of its functions it has the files, with what these import from the same folder, and what they have closed over; of
    data the bytes. Not seen are libraries, and objects of other kinds than these. None if a function is in no file, as
    those of a notebook are.
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(value, {}):
            digest.update(part)
    except (Unrecognised, RecursionError):
        return None
    return digest.hexdigest()[:16]


def _parts(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Yield the bytes of what makes a value; ``seen`` has those before it, which come once, by their id."""
    yield f"{type(value).__qualname__}:".encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield f"{value!r};".encode()
        return
    if id(value) in seen:
        yield f"{seen[id(value)][0]};".encode()
        return
    seen[id(value)] = len(seen), value
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        items: Any = (value.tolist(),) if value.dtype == object else ()
        yield f"{value.dtype}{value.shape}".encode()
        yield b"" if items else value.tobytes()
    elif hasattr(value, "dtype"):  # keys of random numbers
        items = (str(value),)
    elif isinstance(value, Mapping):
        items = [one for item in value.items() for one in item]
    elif isinstance(value, tuple | list):
        items = value
    elif isinstance(value, set | frozenset):
        items = sorted(value, key=repr)
    elif isinstance(value, functools.partial):
        items = (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        items = (value.__func__, value.__self__)
    elif isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):  # compiled functions
        items = (wrapped,)
    elif isinstance(value, types.FunctionType):
        code, cells = value.__code__, value.__closure__ or ()
        yield _source(code.co_filename, value.__globals__) + f"{code.co_qualname}:{code.co_firstlineno}".encode()
        filled = [cell.cell_contents for cell in cells if cell != types.CellType()]  # not those without a value
        items = (value.__defaults__, value.__kwdefaults__, filled)
    else:
        kind = value if isinstance(value, type) else type(value)
        items = (f"{kind.__module__}.{kind.__qualname__}", str(getattr(value, "__name__", "")))
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is not None and not _is_of_library(file):
            yield _source(file, vars(sys.modules[kind.__module__]))
            items = (*items, {} if isinstance(value, type) else getattr(value, "__dict__", {}))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = (*items, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    for item in items:
        yield from _parts(item, seen)
    yield f";{len(items)}".encode()


def _source(file: str, namespace: Mapping[str, Any]) -> bytes:
    """Return the hashes of a file and of those in its folder from which its namespace has something."""
    if _is_of_library(file):
        return b"library"
    found: dict[str, bytes] = {}
    open_files = [(file, namespace)]
    while open_files:
        path, names = open_files.pop()
        if path in found:
            continue
        try:
            found[path] = sha256(Path(path).read_bytes()).encode()
        except OSError:
            raise Unrecognised from None
        for named in list(names.values()):
            name = named.__name__ if isinstance(named, types.ModuleType) else getattr(named, "__module__", None)
            module = sys.modules.get(name) if isinstance(name, str) else None
            beside = getattr(module, "__file__", None)
            if beside and Path(beside).resolve().parent == Path(file).resolve().parent:
                open_files.append((beside, vars(module)))
    return b"".join(sorted(found.values()))


@functools.cache
def _is_of_library(file: str) -> bool:
    standard = Path(sysconfig.get_paths()["stdlib"]) in Path(file).parents
    return standard or file.startswith("<frozen") or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
