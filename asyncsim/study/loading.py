"""Files of studies, and of users' functions: list and import them, and hash a user's.

A study is a Python file with a docstring, a dataclass ``Config`` and a function ``run(config)``.
The shipped ones are in ``studies/`` beside the package (in a clone) or inside it (when installed);
a user's own are in ``studies/`` of the working folder. From Python::

    staleness = asyncsim.study.load("staleness")
    result = staleness.run(staleness.Config(workers=20))
"""

import __future__

import ast
import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncsim.study.results as results
from asyncsim.base.errors import InputError, choices_like, require_choice, shown

#: Options of a study that are arguments of its methods, and of its problem, unless these set their
#: own.
OF_METHODS = ("learning_rate", "optimizer", "momentum")
OF_PROBLEMS = ("batch_size", "workers", "split")
#: The file of each ``FILE.py:FUNCTION`` inside a call: ``robust(rule=FILE.py:FUNCTION)``.
_FILES = re.compile(r"[^\s,=()\[\]'\"]+\.py(?=:)")
#: ``FILE.py:FUNCTION``, with arguments or without.
_USER_FUNCTION = re.compile(r"\s*([^(\0]+?\.py):(.*)", re.DOTALL)


#: Groups of studies: ``asyncsim study gem stability``.
GROUPS = {
    "gem": (
        *("stability", "speedup", "misspecification", "generalization", "kappa", "tensors"),
        *("energy", "momentum"),
    )
}


def without_group(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the group before its study's name."""
    group, *rest = arguments
    if group not in GROUPS:
        return list(arguments)
    require_choice("study", rest[0] if rest else "", GROUPS[group])
    return rest


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
    subject, path = f"{option} = {shown(entry)}", Path(file).resolve()
    if not path.is_file():
        raise InputError(f"{subject}: there is no file {file}; give its path from this folder")
    if folder := results.around(Path(file).absolute()) or results.around(path):
        raise InputError(
            f"{subject}: {file} lies in the results {folder}, and nothing in results is run; copy "
            "it to another folder"
        )
    # Like a script, it can import files beside it; but installed packages come first.
    if str(path.parent) not in sys.path:
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


def files_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each file that ``FILE.py:FUNCTION`` names in the values of options."""
    files = dict.fromkeys(
        file for text in _texts(options) for file in (own_file(text)[0], *_FILES.findall(text))
    )
    return {file: sha256(Path(file).read_bytes()) for file in files if Path(file).is_file()}


def require_typed(options: Mapping[str, Any], typed: Sequence[str], folder: str) -> None:
    """Raise InputError for a file of functions that a resumed folder names and the user did not
    type: a stranger may have written the folder.
    """
    for text in _texts(options):
        # A backslash may hide a name in a text.
        if re.search(r"\.py:|\\", text) and not any(text in option for option in typed):
            raise InputError(
                f"resume = {folder!r}: its {results.CONFIG} names {shown(text)}, and files are run "
                "only if you type them; give that option again"
            )


def _texts(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts among the values of options."""
    for value in options.values():
        for text in value if isinstance(value, tuple | list) else (value,):
            if isinstance(text, str):
                yield text


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
