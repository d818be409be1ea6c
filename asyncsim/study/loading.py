"""Files of studies, and of users' functions: list and import them, and recognise them when a study
is resumed.

A study is a Python file with a docstring, a dataclass ``Config`` and a function ``run(config)``.
The shipped ones are in ``studies/`` beside the package (in a clone) or inside it (when installed);
a user's own are in ``studies/`` of the working folder. From Python::

    staleness = asyncsim.study.load("staleness")
    result = staleness.run(staleness.Config(workers=20))
"""

import __future__

import ast
import contextlib
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
from asyncsim.base.calls import Call, read, split
from asyncsim.base.errors import InputError, choices_like, require_choice, shown
from asyncsim.base.files import field_values, open_file, require_plain, results_of

#: Options of a study that are arguments of its methods, and of its problem, unless these set their
#: own.
OF_METHODS = ("learning_rate", "optimizer", "momentum")
OF_PROBLEMS = ("batch_size", "workers", "split")
#: ``FILE.py:FUNCTION``, with arguments or without.
_USER_FUNCTION = re.compile(r"\s*([^(\0]+?\.py):(.*)", re.DOTALL)


def studies() -> dict[str, Path]:
    """Return the file of every study, by name: the shipped ones, then the working folder's own.

    A user's file never takes the place of a shipped study; see `hidden`.
    """
    return {**_user_studies(), **_files(shipped("studies"))}


def hidden() -> dict[str, Path]:
    """Return the working folder's files that a shipped study of the same name hides."""
    if Path("asyncsim", "__init__.py").exists():  # a clone, whose studies are the shipped ones
        return {}
    ours = _files(shipped("studies"))
    return {name: path for name, path in _user_studies().items() if name in ours}


def shipped(name: str) -> Path:
    """Return the folder of the shipped ``studies`` or ``figures``: inside the installed package, or
    beside it.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def load(name: str, options_alone: bool = False) -> ModuleType:
    """Import a study; ``options_alone``: only its Config and SCALES, with what these need of its
    imports.
    """
    paths = studies()
    path = paths[require_choice("study", name, paths)]
    try:
        if options_alone and (options := _options_of(name, path)) is not None:
            return options
        module = load_file(f"asyncsim.studies.{name}", path)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"study = {name!r}: {path} cannot be imported: {told_in_a_line(error, path)}"
        ) from error
    missing = [name for name in ("Config", "run") if not callable(getattr(module, name, None))]
    if missing:
        raise InputError(
            f"study = {name!r}: {path} has no {' and no '.join(missing)}; "
            "a study is a dataclass Config and a function run(config)"
        )
    return module


def _options_of(name: str, path: Path) -> ModuleType | None:
    """Return a module of a study's options alone, without the heavy imports of its file.

    None if the file is no study, or has top-level statements with unknown effects on the options.
    """
    tree = ast.parse(path.read_bytes())
    docstring = ast.get_docstring(tree)
    statements = tree.body[docstring is not None :]
    kinds = (
        ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef
    )
    if not all(isinstance(statement, kinds) for statement in statements):
        return None
    if not {"Config", "run"} <= set().union(*map(_bound, statements)):
        return None
    required = {"Config", "SCALES"}
    selected: list[ast.stmt] = []
    for statement in reversed(statements):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            aliases = statement.names
            statement.names = [
                alias
                for alias in aliases
                if (alias.asname or alias.name.partition(".")[0]) in required
            ]
            if statement.names:
                selected.append(statement)
        elif required & _bound(statement):
            names = (node for node in _evaluated(statement) if isinstance(node, ast.Name))
            required |= {name.id for name in names if isinstance(name.ctx, ast.Load)}
            selected.append(statement)
    module = ModuleType(f"asyncsim.options.{name}", docstring)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses look for the names of annotations
    body = ast.Module(selected[::-1], [])
    try:
        exec(
            compile(
                body, str(path), "exec", __future__.annotations.compiler_flag, dont_inherit=True
            ),
            vars(module),
        )
    except NameError:  # a name that only the Config's methods need
        return None
    return module


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds; none for an import."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that defining the options evaluates: no bodies of methods, except special
    methods.
    """
    yield node
    for child in ast.iter_child_nodes(node):
        if (
            isinstance(node, ast.ClassDef)
            and isinstance(child, ast.FunctionDef)
            and not child.name.startswith("__")
        ):
            for part in child.decorator_list:
                yield from ast.walk(part)
        else:
            yield from _evaluated(child)


def own_file(text: str) -> tuple[str, str]:
    """Return the user's file that an entry names, or an empty text, and the rest of the entry."""
    match = _USER_FUNCTION.fullmatch(text)
    return (match[1], match[2].strip()) if match else ("", text.strip())


def load_function(option: str, entry: str, file: str, name: str, kind: str) -> Callable[..., Any]:
    """Import a function of a file that returns a ``kind``; raise InputError if there is none."""
    subject, path = f"{option} = {shown(entry)}", require_plain(Path(file)).resolve()
    if not path.is_file():
        raise InputError(f"{subject}: there is no file {file}; give its path from this folder")
    # Like a script, it can import files beside it; but installed packages come first, and results
    # never count.
    if str(path.parent) not in sys.path and results_of(path) is None:
        sys.path.append(str(path.parent))
    try:
        module = load_file(f"asyncsim.own.{path.stem}", path)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{subject}: cannot be imported: {told_in_a_line(error, str(path))}; repair that line "
            f"of {file}"
        ) from error
    function = getattr(module, name, None)
    if function is None:
        functions = [
            key
            for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        ]
        remedy = choices_like(name, functions) if functions else f"write one that returns a {kind}"
        raise InputError(f"{subject}: {file} has no function {name}; {remedy}")
    if not callable(function):
        raise InputError(
            f"{subject}: {name} is a {type(function).__name__}, must be a function that returns a "
            f"{kind}"
        )
    return function


def files_of(options: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the files of all ``FILE.py:FUNCTION`` in the values of options: option and sha256 by
    path.
    """
    hashes = {}
    for option, value in options.items():
        texts = [
            text
            for text in (value if isinstance(value, tuple | list) else (value,))
            if isinstance(text, str)
        ]
        for entry in dict.fromkeys([*texts, *_texts_in(split(texts))]):
            file, _ = own_file(entry)
            if file and require_plain(Path(file)).is_file():
                with open_file(Path(file)) as file_handle:
                    hashes[file] = option, sha256(file_handle.read())
    return hashes


def _texts_in(value: Any) -> Iterator[str]:
    """Yield a text and the texts among the arguments of its call, such as a method's rule."""
    match value:
        case str():
            yield value
            with contextlib.suppress(InputError):  # building the entry raises it
                yield from _texts_in(read(own_file(value)[1], "a call", ""))
        case Call():
            for argument in (*value.positional, *(argument for _, argument in value.named)):
                yield from _texts_in(argument)
        case list():
            for entry in value:
                yield from _texts_in(entry)


def require_as_they_were(values: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError for a file that only a folder of results names, if it may be a stranger's.

    Such a file is imported again only if it lies outside the folder and has the recorded hash, or
    if the user typed it.
    """
    recorded = results.config_of(folder).get(results.FILES)
    for file, (option, digest) in files_of(values).items():
        if results_of(Path(file)) or results_of(Path(file).resolve()):
            why = "lies inside the results"
        elif not isinstance(recorded, dict) or file not in recorded:
            why = f"has no hash in {results.CONFIG}"
        elif recorded[file] != digest:
            problem = f"resume = {str(folder)!r}: {file} is not the file that it was"
            raise InputError(f"{problem}; restore the file, or {results.RESTART}")
        else:
            continue
        raise InputError(
            f"resume = {str(folder)!r}: {file} {why}, so it is not run because {results.CONFIG} "
            "names it; give "
            f"--{option.replace('_', '-')} again if you trust it"
        )


def load_file(name: str, path: Path) -> ModuleType:
    """Import a Python file under a module name, again if it has changed; it runs exactly the bytes
    of this read.
    """
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
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def told_in_a_line(error: BaseException, path: str | Path) -> str:
    """Return an error in one line, with the line of the file that caused it."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    line = f"line {lines[-1]}: " if lines else ""
    return f"{line}{type(error).__name__}: {error}"


def _user_studies() -> dict[str, Path]:
    return _files(Path.cwd() / "studies")


def _files(folder: Path) -> dict[str, Path]:
    return {
        path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")
    }


class Unrecognised(Exception):
    """A function without a file."""


def recognised(value: Any) -> str | None:
    """Return a hash by which a method or a problem is recognised, also in another process.

    It covers the files of functions, files of the same folder that these import, closures, and the
    bytes of data; it does not cover libraries and other objects. None if a function is in no file,
    as in a notebook.
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(value, {}):
            digest.update(part)
    except (Unrecognised, RecursionError):
        return None
    return digest.hexdigest()[:16]


def _parts(value: Any, earlier: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Yield the bytes that determine a value; ``earlier`` objects, by their ids, are yielded
    once.
    """
    yield f"{type(value).__qualname__}:".encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield f"{value!r};".encode()
        return
    if id(value) in earlier:
        yield f"{earlier[id(value)][0]};".encode()
        return
    earlier[id(value)] = len(earlier), value
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        items: Any = (value.tolist(),) if value.dtype == object else ()
        yield f"{value.dtype}{value.shape}".encode()
        yield b"" if items else value.tobytes()
    elif hasattr(value, "dtype"):  # keys of random numbers
        items = (str(value),)
    elif isinstance(value, Mapping):
        items = [entry for item in value.items() for entry in item]
    elif isinstance(value, tuple | list):
        items = value
    elif isinstance(value, set | frozenset):
        items = sorted(value, key=repr)
    elif isinstance(value, functools.partial):
        items = (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        items = (value.__func__, value.__self__)
    elif isinstance(
        wrapped := getattr(value, "__wrapped__", None), types.FunctionType
    ):  # compiled functions
        items = (wrapped,)
    elif isinstance(value, types.FunctionType):
        code, cells = value.__code__, value.__closure__ or ()
        yield (
            _source(code.co_filename, value.__globals__)
            + f"{code.co_qualname}:{code.co_firstlineno}".encode()
        )
        filled = [
            cell.cell_contents for cell in cells if cell != types.CellType()
        ]  # not those without a value
        items = (value.__defaults__, value.__kwdefaults__, filled)
    else:
        kind = value if isinstance(value, type) else type(value)
        items = (f"{kind.__module__}.{kind.__qualname__}", str(getattr(value, "__name__", "")))
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is not None and not _is_of_library(file):
            yield _source(file, vars(sys.modules[kind.__module__]))
            items = (*items, {} if isinstance(value, type) else getattr(value, "__dict__", {}))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            items = (*items, field_values(value))
    for item in items:
        yield from _parts(item, earlier)
    yield f";{len(items)}".encode()


def _source(file: str, namespace: Mapping[str, Any]) -> bytes:
    """Return the hashes of a file and of the files of its folder that its namespace uses."""
    if _is_of_library(file):
        return b"library"
    digests: dict[str, bytes] = {}
    open_files = [(file, namespace)]
    while open_files:
        path, names = open_files.pop()
        if path in digests:
            continue
        try:
            digests[path] = sha256(Path(path).read_bytes()).encode()
        except OSError:
            raise Unrecognised from None
        for named in list(names.values()):
            name = (
                named.__name__
                if isinstance(named, types.ModuleType)
                else getattr(named, "__module__", None)
            )
            module = sys.modules.get(name) if isinstance(name, str) else None
            neighbour = getattr(module, "__file__", None)
            if neighbour and Path(neighbour).resolve().parent == Path(file).resolve().parent:
                open_files.append((neighbour, vars(module)))
    return b"".join(sorted(digests.values()))


@functools.cache
def _is_of_library(file: str) -> bool:
    standard = Path(sysconfig.get_paths()["stdlib"]) in Path(file).parents
    return (
        standard
        or file.startswith("<frozen")
        or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    )
