"""The result of a replay: a row per commit, a row per evaluation, and the final parameters."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from asyncsim.base import hooks
from asyncsim.base.console import counted
from asyncsim.base.errors import InputError, require_free, require_path
from asyncsim.base.files import RUN, files_below, open_file, plain, sealed, unsealed, whole_folder
from asyncsim.base.markup import card

if TYPE_CHECKING:
    import pandas as pd

#: Raised by 1 whenever an older asyncsim can no longer read the files.
FORMAT = 2
_TABLES = ("commits", "evaluations", "diagnostics")
_FILES = (*(f"{name}.parquet" for name in _TABLES), "params.npz")
#: Only of runs without a server.
_REPLICAS = "replicas.npz"
#: Prefix of the columns of `positions`.
POSITION = "position_"


@dataclass(eq=False)
class Run:
    """One method replayed on one trace.

    Attributes
    ----------
    commits : pandas.DataFrame
        One row per commit: ``commit``, ``commit_time`` (s), ``worker``, ``worker_step``,
        ``staleness``, ``loss`` (of the worker's minibatches), ``update_norm`` (of the central
        variable's step; where the server adds a worker's unchanged update, of the update, before
        the sum is rounded), and the columns of the replay's recorders. The step of a version that a
        death completes is at its last message, as in `Trace.accepted`; a restore is no step: the
        ``update_norm`` of the next commit is the step from the restored variable. A run that
        diverged ends with the commit at which it did.
    evaluations : pandas.DataFrame
        One row per evaluation, at the start and after commits that complete a version: ``commit``
        (commits applied), ``commit_time`` (s), ``worker_step`` (commits per worker), ``gradients``
        (in messages taken up so far, without discarded and cancelled ones), and ``train_`` and
        ``test_`` with the problem's measures.
    diagnostics : pandas.DataFrame
        Recorders' summaries of whole vectors: a row per recorded commit, quantity, and quantile or
        tensor.
    params : tree
        The central variable after the last commit, NumPy arrays in the problem's tree; where the
        server waits for several messages, messages of an incomplete version are included. If the
        run diverged, the central variable of a few commits later.
    diverged_at : int or None
        The commit at which a value stopped being finite.
    config : dict
        Method, problem, cluster, seed, precision and package versions: plain values.
    replicas : tree or None
        Without a server the replicas of all workers after the last commit, each array of ``params``
        with a leading axis of workers; in stochastic gradient push the replicas at which gradients
        are computed. None with a server.
    """

    commits: "pd.DataFrame"
    evaluations: "pd.DataFrame"
    diagnostics: "pd.DataFrame"
    params: Any
    diverged_at: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    replicas: Any = None

    def __repr__(self) -> str:
        """Describe the run in one line; its tables have thousands."""
        title = " on ".join(
            str(self.config[name]) for name in ("method", "problem") if name in self.config
        )
        ended = (
            self.status if self.diverged_at is None else f"diverged at commit {self.diverged_at}"
        )
        seed = f", seed {self.config['seed']}" if "seed" in self.config else ""
        return (
            f"<Run{' of ' if title else ''}{title}: {counted(len(self.commits), 'commit')}, "
            f"{ended}{seed}>"
        )

    def _repr_html_(self) -> str:
        """Show the run in a notebook, with its last evaluation as a table."""
        return card(repr(self).strip("<>"), self.evaluations.iloc[-1].to_dict())

    @property
    def status(self) -> str:
        """``"finished"`` or ``"diverged"``."""
        return "finished" if self.diverged_at is None else "diverged"

    def plot(self, measure: str = "train_loss", against: str = "time") -> Any:
        """Draw a column of ``evaluations`` along simulated time ("time") or worker steps ("step").

        `asyncsim.plots.compare` draws several runs on the same axes.
        """
        return hooks.plots().compare(self, measure, against)

    def save(self, path: str | os.PathLike) -> Path:
        """Write the run as a folder of parquet tables, ``params.npz`` and ``run.json``, or nothing.

        The replicas of a run without a server are in ``replicas.npz``.

        Raises
        ------
        InputError
            The folder exists already, or cannot be written.
        """
        target = require_free("path", path)
        with whole_folder(target) as partial:
            self._write(partial)
        return target

    def _write(self, folder: Path) -> None:
        for name in _TABLES:
            getattr(self, name).to_parquet(folder / f"{name}.parquet", index=False)
        structure = _save_tree(folder / "params.npz", self.params)
        files = _FILES
        if self.replicas is not None:
            _save_tree(folder / _REPLICAS, self.replicas)
            files = (*_FILES, _REPLICAS)
        header = {
            "format": FORMAT,
            "diverged_at": self.diverged_at,
            "config": self.config,
            "params": structure,
            "files": {name: _checksum(folder / name) for name in files},
        }
        (folder / RUN).write_text(sealed(plain(header)))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Run":
        """Read a run that `save` wrote.

        Containers of the parameters other than dicts, lists and tuples become lists of leaves; keys
        become text.
        """
        import pandas as pd

        folder = require_path("path", path)
        inside = [path for path in files_below(folder / "runs") if path.name == RUN]
        if not (folder / RUN).exists() and inside:
            names = ", ".join(str(path.parent.relative_to(folder / "runs")) for path in inside[:20])
            names += ", ..." if len(inside) > 20 else ""
            raise InputError(
                f"path = {str(folder)!r}: is the folder of a study; give one of its runs, "
                f"{inside[0].parent}: {names}"
            )
        try:
            header = unsealed(folder / RUN, FORMAT)
            contents: dict[str, Any] = {}
            for name in (*_FILES, _REPLICAS) if _REPLICAS in header["files"] else _FILES:
                with open_file(folder / name) as file:
                    if header["files"][name] != hashlib.file_digest(file, "sha256").hexdigest():
                        raise ValueError(f"{name} is not as it was written")
                    file.seek(0)
                    stem, is_table = Path(name).stem, name.endswith(".parquet")
                    contents[stem] = (
                        pd.read_parquet(file) if is_table else _load_tree(file, header["params"])
                    )
            return cls(**contents, diverged_at=header["diverged_at"], config=dict(header["config"]))
        except Exception as error:  # files of any content raise any error
            raise InputError(
                f"path = {str(folder)!r}: not a complete run ({error}); give a folder that "
                "Run.save wrote"
            ) from error


def leaders(commits: Any, workers: int) -> np.ndarray:
    """Return the single leader of `lsgd` after each commit: the worker of the least reported loss.

    ``commits``: of an `asyncsim.Run`.
    """
    last_losses, leader = np.full(workers, np.inf), []
    for worker, loss in zip(commits["worker"], commits["loss"], strict=True):
        last_losses[worker] = loss
        leader.append(int(np.argmin(last_losses)))
    return np.array(leader)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _save_tree(file: Path, tree: Any) -> Any:
    """Write a tree's leaves; return its structure as JSON."""
    leaves: list[np.ndarray] = []
    structure = _describe(tree, leaves)
    arrays: dict[str, Any] = {f"leaf_{i}": leaf for i, leaf in enumerate(leaves)}
    np.savez(file, **arrays)
    return structure


def _load_tree(file: BinaryIO, structure: Any) -> Any:
    with np.load(file) as arrays:
        return _rebuild(structure, arrays)


def _describe(tree: Any, leaves: list[np.ndarray]) -> Any:
    """Return the structure of a tree as JSON, appending its leaves to ``leaves``."""
    if isinstance(tree, dict):
        return {"dict": {str(key): _describe(value, leaves) for key, value in tree.items()}}
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return {type(tree).__name__: [_describe(value, leaves) for value in tree]}
    if isinstance(tree, np.ndarray | np.generic):
        leaves.append(np.asarray(tree))
        return len(leaves) - 1
    import jax

    return {"list": [_describe(np.asarray(leaf), leaves) for leaf in jax.tree.leaves(tree)]}


def _rebuild(structure: Any, arrays: Any) -> Any:
    """Return the tree that `_describe` described."""
    if isinstance(structure, int):
        return arrays[f"leaf_{structure}"]
    (kind, content), *_ = structure.items()
    if kind == "dict":
        return {key: _rebuild(value, arrays) for key, value in content.items()}
    values = [_rebuild(value, arrays) for value in content]
    return tuple(values) if kind == "tuple" else values
