"""The cluster: what it accepts, what it refuses and with which words, and its JSON round trip."""

import json
import warnings

import numpy as np
import pytest

from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster, Policy, asynchronous
from asyncsim.clusters.laws import Constant, Exponential, Gamma, Mixture, Uniform
from asyncsim.clusters.workers import HeterogeneityWarning


def test_laws_from_numbers_and_texts():
    cluster = Cluster(
        2, "gamma(mean=1, cv=0.2)", service=0.005, latency=("exponential(mean=0.1)", 0.2)
    )
    assert cluster.compute == Gamma(1.0, 0.2)
    assert cluster.service == Constant(0.005)
    assert (cluster.latency_up, cluster.latency_down) == (Exponential(0.1), Constant(0.2))
    assert cluster.compute_laws == (Gamma(1.0, 0.2),) * 2


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


def test_one_worker_with_a_list_of_one_law_is_no_heterogeneity():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cluster(1, [2.0]).compute == Constant(2.0)


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


def test_messages_of_one_size_both_ways_are_no_pair():
    assert Cluster(1, 1.0, bandwidth=8, message_bytes=(4, 4.0)) == Cluster(
        1, 1.0, bandwidth=8, message_bytes=4
    )


@pytest.mark.parametrize(
    ("protocol", "exclusive", "separate"),
    [
        ("exchange", True, False),
        ("read_then_write", True, False),
        ("read_then_write", False, True),
        ("write_then_read", True, True),
    ],
)
def test_separate_reads(protocol, exclusive, separate):
    assert Cluster(1, 1.0, protocol=protocol, exclusive=exclusive).separate_reads is separate


def test_exclusive_means_nothing_with_two_visits():
    assert Cluster(1, 1.0, protocol="write_then_read", exclusive=False) == Cluster(
        1, 1.0, protocol="write_then_read"
    )


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(100, Gamma(1.0, 0.2)),
        Cluster(
            4,
            [Gamma(1.0, 0.2), Gamma(1.0, 0.2), Uniform(1, 2), Constant(3)],
            latency=(0.1, Exponential(2)),
        ),
        Cluster(
            workers=2,
            compute=Mixture([Gamma(1, 0.2), Constant(9)], [0.9, 0.1]),
            service="0.1",
            latency=0.3,
            bandwidth=10,
            message_bytes=5,
            shared_bandwidth=True,
            window=4,
            protocol="read_then_write",
            exclusive=False,
            discipline="random",
            policy=asynchronous(),
        ),
    ],
    ids=["default", "per worker", "everything"],
)
def test_json_round_trip(cluster):
    restored = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert restored == cluster
    assert hash(restored) == hash(cluster)


def test_from_dict_names_what_is_wrong():
    values = Cluster(2, 1.0).to_dict()
    with pytest.raises(
        InputError, match=r"cluster entry = 'servise': unknown; did you mean 'service'"
    ):
        Cluster.from_dict({**values, "servise": "1"})
    del values["compute"]
    with pytest.raises(InputError, match=r"cluster: the entry 'compute' is missing; add it"):
        Cluster.from_dict(values)
    with pytest.raises(InputError, match=r"policy entry = 'coun': unknown; did you mean 'count'"):
        Cluster.from_dict({"workers": 2, "compute": "1", "policy": {"name": "buffered", "coun": 2}})
    with pytest.raises(InputError, match=r"policy = 'first_k': unknown"):
        Policy("first_k")
