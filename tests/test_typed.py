"""The public API as a type checker sees it: natural calls pass, mistakes are found."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USE = """
import asyncsim
from asyncsim import Cluster, Gamma, methods, problems

latency = (0.1, Gamma(1, 0.2))
cluster = Cluster(workers=3, compute=1.0, service="0.1", latency=latency, policy="barrier(2)")
Cluster(2, ["gamma(1, 0.2)", 2.0], bandwidth=1e6, message_bytes=(1, 2), window=[1, 2])
asyncsim.Mixture([asyncsim.Constant(1), 9.0], [0.9, 0.1])
trace = asyncsim.simulate(cluster, commits=20, seed=0)
digits = problems.digits(batch_size=8)
run = asyncsim.replay(trace, methods.gem(learning_rate=0.05, kappa=2), digits, seed=0)
run.params, run.commits["loss"], trace.frame, trace.summary()["throughput"]
Cluster(workers="ten", compute=1.0)  # wrong
asyncsim.simulate(cluster, commits="many")  # wrong
methods.gem(kappa="large")  # wrong
asyncsim.replay(cluster, methods.gem(), problems.digits())  # wrong
asyncsim.unknown  # wrong
trace.unknown  # wrong
"""


@pytest.mark.full
def test_natural_calls_are_typed(tmp_path):
    api = pytest.importorskip("mypy.api")
    use = tmp_path / "use.py"
    use.write_text(USE)
    # The project's own options, so that its cache serves.
    told, _, _ = api.run([f"--config-file={ROOT / 'pyproject.toml'}", str(use)])
    found = {int(line.split(":")[1]) for line in told.splitlines() if ": error: " in line}
    assert found == {i for i, line in enumerate(USE.splitlines(), 1) if line.endswith("# wrong")}, (
        told
    )
