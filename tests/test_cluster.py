"""The cluster: what it accepts, what it refuses and with which words, and its JSON round trip."""

import json

import numpy as np
import pytest

from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster
from asyncsim.clusters.laws import Gamma
from asyncsim.clusters.workers import HeterogeneityWarning


def test_a_law_per_worker_from_an_array():
    assert Cluster(2, np.array([1, 2.5])) == Cluster(2, [1.0, 2.5])
    assert Cluster(2, 1.0, latency=np.array([0.1, 0.2])) == Cluster(2, 1.0, latency=(0.1, 0.2))
    assert Cluster(2, np.array(2.0)) == Cluster(2, 2.0)
    with pytest.raises(InputError, match=r"compute\[0\] = \[1.0, 2.0\]: must be one law"):
        Cluster(2, np.array([[1.0, 2.0]] * 2))


def test_equal_speeds_are_said_aloud_and_are_one_law():
    with pytest.warns(
        HeterogeneityWarning, match=r"all 3 are .*changes nothing; give one law"
    ) as caught:
        cluster = Cluster(3, [Gamma(1, 0.2)] * 3)
    assert caught[0].filename == __file__
    assert cluster == Cluster(3, Gamma(1, 0.2))


@pytest.mark.parametrize(
    ("given", "up", "down"),
    [
        ({}, 0.0, 0.0),
        ({"bandwidth": 8.0, "message_bytes": 4}, 0.5, 0.5),
        ({"bandwidth": 8.0, "message_bytes": [1, 4]}, 0.125, 0.5),
    ],
)
def test_transfers(given, up, down):
    cluster = Cluster(1, 1.0, **given)
    assert (cluster.transfer_up, cluster.transfer_down) == (up, down)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def test_from_dict_names_what_is_wrong():
    values = Cluster(2, 1.0).to_dict()
    with pytest.raises(
        InputError, match=r"cluster entry = 'servise': unknown; did you mean 'service'"
    ):
        Cluster.from_dict({**values, "servise": "1"})
    del values["compute"]
    with pytest.raises(InputError, match=r"cluster: the entry 'compute' is missing; add it"):
        Cluster.from_dict(values)
    with pytest.raises(InputError, match=r"policy = 'first_k': unknown"):
        Cluster.from_dict({"workers": 2, "compute": "1", "policy": "first_k"})
