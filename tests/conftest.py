"""Strict JAX for all tests: no implicit promotion between types."""

import os
from pathlib import Path

import jax
import pytest
from hypothesis import Phase, settings

from asyncsim import study
from asyncsim.__main__ import main
from asyncsim.replays import programs, tuning

# The same draws each time, and no time spent on a smaller example: what was drawn is in the error.
PHASES = [Phase.explicit, Phase.generate]
settings.register_profile("drawn", deadline=None, derandomize=True, database=None, phases=PHASES)
settings.load_profile("drawn")


@pytest.fixture(autouse=True, scope="session")
def strict_promotion():
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def compile_as(users: bool) -> None:
    """Compile with LLVM's optimizations, or without: they take a third of most tests' time and move
    round-off alone.
    """
    if jax.config.read("jax_disable_most_optimizations") == users:
        jax.config.update("jax_disable_most_optimizations", not users)
        jax.clear_caches()
        programs._build.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled(request):
    """Files that hold numbers of different programs against each other say ``OPTIMIZED = True``."""
    compile_as(users=getattr(request.module, "OPTIMIZED", False))


@pytest.fixture
def optimized():
    """Single tests that do so."""
    compile_as(users=True)
    yield
    compile_as(users=False)


@pytest.fixture(autouse=True, scope="session")
def index_of_the_tests(tmp_path_factory):
    """Studies that several tests share do not get into the user's own index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCSIM_INDEX", str(tmp_path_factory.mktemp("index")))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_run_at_a_time():
    """Runs end in the order of the study unless a test asks for several at once; tests run side by
    side themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "replays_at_once", lambda problem, workers: 1)
        yield


@pytest.fixture
def lenient():
    """JAX as a user has it: optax and schedules mix types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """An empty working folder and an index of the test's own, and no data of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCSIM_INDEX", f"{tmp_path}-index")
    monkeypatch.delenv("ASYNCSIM_DATA", raising=False)


@pytest.fixture
def quick_figures(monkeypatch):
    """Lay figures out without rendering them: their files have one byte."""
    monkeypatch.setattr("asyncsim.drawing.look._rendered", lambda figure, kind: b"x")


@pytest.fixture
def told(capsys):
    """Run a study by its command line; return the exit code and the lines on standard output and
    standard error.

    An error and its hint are joined to one line.
    """

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        code = study.main(arguments)
        output = capsys.readouterr()
        return code, output.out.splitlines(), output.err.replace("\nhint: ", "; ").splitlines()

    return run


@pytest.fixture
def command(capsys):
    """Run ``asyncsim``; return the exit code and the text on standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        output = capsys.readouterr()
        return code, output.out, output.err.replace("\nhint: ", "; ")

    return run


@pytest.fixture(autouse=True, scope="session")
def compiled_once(pytestconfig):
    """Compiled programs are shared with the other processes of these tests and with the next tests,
    and never with the user's studies.

    They are kept in ``.pytest_cache``, by the version of jaxlib; ``ASYNCSIM_TEST_CACHE`` names
    another folder.
    """
    name, base = f"compiled-{jax.lib.__version__}", os.environ.get("ASYNCSIM_TEST_CACHE")
    folder = str(Path(base) / name if base else pytestconfig.cache.mkdir(name))
    values = {"compilation_cache_dir": folder, "persistent_cache_min_compile_time_secs": 0}
    values["persistent_cache_min_entry_size_bytes"] = -1
    for name, value in values.items():
        os.environ[f"JAX_{name.upper()}"] = str(value)  # for the processes that tests start
        jax.config.update(f"jax_{name}", value)
