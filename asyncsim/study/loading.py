"""Studies as files: which there are, and how they and others that users name are imported.

A study is a Python file with a docstring, a dataclass ``Config`` and a function ``run(config)``. The shipped ones are
in ``studies/`` beside the package (in a clone) or inside it (when installed); a user's own are in ``studies/`` of the
working folder. From Python::

    staleness = asyncsim.study.load("staleness")
    result = staleness.run(staleness.Config(workers=20))
"""

import hashlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncsim.calls import split
from asyncsim.errors import InputError, require_choice, shown
from asyncsim.study import results


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


def load(name: str) -> ModuleType:
    """Import a study.

    Raises
    ------
    InputError
        There is no study of that name, or its file cannot be imported or is not a study.
    """
    found = studies()
    path = found[require_choice("study", name, found)]
    try:
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


#: ``FILE.py:FUNCTION``, with arguments or without.
_OWN = re.compile(r"\s*([^(]+?\.py):(.*)", re.DOTALL)


def own_file(text: str) -> tuple[str, str]:
    """Return the file of the user's own that an entry names, empty if it names none, and the rest of the entry."""
    found = _OWN.fullmatch(text)
    return (found[1], found[2].strip()) if found else ("", text.strip())


def load_function(option: str, entry: str, file: str, name: str, kind: str) -> Callable[..., Any]:
    """Return a function of a file, which returns something of a ``kind``; raise InputError if there is none."""
    told, path = f"{option} = {shown(entry)}", Path(file).absolute()
    if not path.is_file():
        raise InputError(f"{told}: there is no file {file}")
    if str(path.parent) not in sys.path:  # as of a script: what lies beside it can be imported
        sys.path.insert(0, str(path.parent))
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
            if file and Path(file).is_file():
                found[file] = option, sha256(Path(file).read_bytes())
    return found


def require_as_they_were(values: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError for a file in values of options that only a folder of results names, if it may be a stranger's.

    It is imported again only if its hash is that which is recorded and it lies outside the folder; or if it is typed.
    """
    recorded = results.config_of(folder).get(results.FILES)
    for file, (option, found) in files_of(values).items():
        if folder.resolve() in Path(file).resolve().parents:
            why = "lies inside the results"
        elif not isinstance(recorded, dict) or recorded.get(file) != found:
            why = "is not the file that it was"
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
