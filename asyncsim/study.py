"""The command line: ``python -m asyncsim.study NAME [options]``.

A study is a Python file with a docstring, a dataclass ``Config`` and a function ``run(config)``. The shipped ones are
in ``studies/`` beside the package (in a clone) or inside it (when installed); a user's own are in ``studies/`` of the
working folder. From Python::

    staleness = asyncsim.study.load("staleness")
    result = staleness.run(staleness.Config(workers=20))
"""

import ast
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from asyncsim.errors import InputError, require_choice

INTERRUPTED = 130  #: Exit code after Ctrl-C, as shells have it.
_USAGE = """usage: python -m asyncsim.study NAME [options]
       python -m asyncsim.study NAME --help

studies:"""


def studies() -> dict[str, Path]:
    """Return the file of every study, by name: the shipped ones, then the working folder's own."""
    found: dict[str, Path] = {}
    for folder in (shipped("studies"), Path.cwd() / "studies"):
        for path in sorted(folder.glob("*.py")):
            if not path.stem.startswith("_"):
                # A user's file never takes the place of a shipped study.
                found.setdefault(path.stem, path)
    return found


def shipped(name: str) -> Path:
    """Return the folder of the shipped ``studies`` or ``figures``: inside the installed package, or beside it."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def load(name: str) -> ModuleType:
    """Import a study.

    Raises
    ------
    InputError
        There is no study of that name.
    """
    found = studies()
    require_choice("study", name, found)
    return load_file(f"asyncsim.studies.{name}", found[name])


def load_file(name: str, path: Path) -> ModuleType:
    """Import a Python file under a module name, once."""
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == str(path):
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{str(path)!r}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def overview() -> str:
    """Return the list of studies, one line each, without importing them."""
    lines = []
    for name, path in studies().items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines.append(f"  {name:<12} {text.partition(chr(10))[0]}")
    return "\n".join([_USAGE, *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study from the command line; return the exit code (2 for bad input)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    try:
        study = load(arguments[0])
        import tyro

        config = tyro.cli(
            study.Config,
            prog=f"python -m asyncsim.study {arguments[0]}",
            description=study.__doc__,
            args=arguments[1:],
            config=(tyro.conf.FlagCreatePairsOff,) if hasattr(tyro.conf, "FlagCreatePairsOff") else None,
        )
        study.run(config)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
