"""The cells of a study: their names, clusters, methods and problems, and what a run sends."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from asyncsim import Cluster, InputError, methods, problems, replay, simulate, study
from asyncsim.study import comparison
from asyncsim.study.cell import meet, same_gradients
from asyncsim.study.comparison import costs
from asyncsim.study.config import StudyConfig
from asyncsim.study.sweep import ComparisonConfig, sweep

gossip, windows = study.load("gossip"), study.load("windows")


# Options


def test_reading_options_leaves_the_types_of_other_studies(recwarn):
    for name in ("robustness", "policies", "replicas"):
        study.configure(name, [])
    assert not [warning for warning in recwarn if "does not match" in str(warning.message)]


def test_any_option_may_have_several_values():
    options = "--window 4 16 --policy barrier first_of(2)"
    _, config = study.configure("compare", options.split())
    assert config.points() == [
        {"window": window, "policy": policy}
        for window in (4, 16)
        for policy in ("barrier", "first_of(2)")
    ]
    assert config.at(window=16).window == 16 and config.at(window=16).policy == "barrier"


@pytest.mark.parametrize("name", ["stability", "energy", "tensors", "windows"])
def test_scales_are_valid_and_chosen_by_name(name):
    module = study.load(name)
    assert {scale: config.scale for scale, config in module.SCALES.items()} == {
        "small": "small",
        "paper": "paper",
    }
    for scale, config in module.SCALES.items():
        config.check()
        assert study.configure(name, ["--scale", scale])[1] == config
    small, paper = module.SCALES["small"], module.SCALES["paper"]
    _, more = study.configure(name, ["--scale", "paper", "--seeds", "7"])
    assert more == dataclasses.replace(paper, seeds=7)
    assert small == module.Config() and small.problem == "digits" != paper.problem


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        # 1,437 examples in minibatches of 32: 44.9 in a pass, so 22 visits of both workers, 2 %
        # short of one.
        ({"epochs": 1.0}, []),
        # One visit of both is 800 minibatches.
        (
            {"window": (1, 400), "epochs": 1.0},
            ["workers-2_window-400: whole visits of all workers are 17.8 epochs"],
        ),
        # Two visits of 30 minibatches each in the place of 2.2; that of 22 in the place of 67.4 is
        # right to 2 %.
        (
            {"window": (15, 1), "epochs": 1.5},
            ["workers-2_window-15: whole visits of all workers are 1.34 epochs"],
        ),
        ({"steps": 3}, ["--steps changes nothing beside --epochs"]),
        ({"steps": 3, "epochs": None}, []),
        # The study's own optimizer, which nobody has asked for.
        ({"methods": ("downpour", "gem")}, []),
    ],
)
def test_epochs_that_are_no_whole_visits_and_options_without_effect_are_noted(
    options, notes, monkeypatch, capsys
):
    monkeypatch.setattr(comparison, "run_cells", lambda *of_study, **also: None)
    problem = problems.digits(batch_size=32, hidden=())
    usual = {"workers": (2,), "window": (1,), "methods": ("agn",), "problem": problem}
    windows.run(windows.Config(**usual | options))
    assert capsys.readouterr().err.splitlines() == [f"note: {note}" for note in notes]


# Methods and problems


def test_cells_share_only_what_is_the_same():
    first, other = (problems.quadratic([1.0], start=start) for start in (1.0, 2.0))
    config = ComparisonConfig(methods=("downpour",), workers=(2,), seeds=1, steps=2)
    grid = [{"workers": n, "problem": task} for n, task in ((2, first), (3, other), (4, first))]
    assert [cell.problem for cell in sweep(config, grid)] == [first, other, first]
    message = r"grid: two of its cells are called .workers-2_problem-Problem"
    with pytest.raises(InputError, match=message):
        sweep(config, [{"workers": 2, "problem": problem} for problem in (first, other)])


def test_long_values_are_cut_in_the_names_of_folders():
    options = {"workers": (2,), "problem": "quadratic", "seeds": 1, "steps": 2}
    config = ComparisonConfig(methods=("downpour",), **options)
    laws = [f"empirical([{', '.join(['1.25'] * 60 + [last])}])" for last in ("1", "2")]
    names = [cell.name for cell in sweep(config, [{"workers": 2, "compute": law} for law in laws])]
    assert len(set(names)) == 2 and all(len(name) < 120 for name in names)


@pytest.mark.parametrize("name", ["adam", "nadam", "nadamw"])  # of others, too
def test_a_named_optimizer_is_that_of_optax(name, lenient):
    method = methods.agn(optimizer=methods.named_optimizer(name, 0.02))
    assert method.hyperparameters == {"learning_rate": 0.02, "optimizer": name}
    params, gradients, steps = jnp.array([1.0, -2.0]), jnp.array([0.3, -0.1]), []
    for optimizer in (method.optimizer, getattr(optax, name)(learning_rate=0.02)):
        state = optimizer.init(params)
        for _ in range(3):
            step, state = optimizer.update(gradients, state, params)
            steps.append(step)
    np.testing.assert_array_equal(steps[:3], steps[3:])


def test_studies_take_an_optimizer_with_the_learning_rate(capsys):
    config = StudyConfig(methods=("agn", "gem"), optimizer="rmsprop", learning_rate=0.01)
    agn, gem = config.make_methods()
    assert agn.hyperparameters == {"learning_rate": 0.01, "optimizer": "rmsprop"}
    assert gem.hyperparameters["learning_rate"] == 0.01
    assert "note: --optimizer changes nothing for gem" in capsys.readouterr().err
    message = "optimizer = 'rmsprop': has no rate of its own; give learning_rate"
    with pytest.raises(InputError, match=message):
        dataclasses.replace(config, learning_rate=None).make_methods()


# Clusters


def test_a_needed_window_and_the_same_gradients():
    cluster = Cluster(2, [1.0, 2.0], window=[4, 2])
    assert meet(cluster, methods.dc_asgd().timing).window == 1
    waiting = dataclasses.replace(cluster, policy="barrier(2)")
    assert meet(cluster, methods.Timing(policy="barrier(2)")) == waiting
    # A lone worker has nobody to wait for.
    assert meet(waiting, methods.sgd().timing) == Cluster(1, 1.0)
    with pytest.raises(InputError, match="reads before the server"):
        meet(Cluster(5, 1.0, protocol="read_then_write"), methods.Timing(policy="barrier(3)"))
    eighth = methods.Timing(message_size=0.125)
    assert meet(cluster, eighth) == cluster  # without a bandwidth
    lighter = meet(dataclasses.replace(cluster, bandwidth=100, message_bytes=400), eighth)
    assert (lighter.transfer_up, lighter.transfer_down) == (0.5, 4.0)
    assert meet(lighter, eighth) == lighter
    assert same_gradients(90, cluster, meet(cluster, methods.Timing(window=1))) == 270
    method = methods.downpour()._replace(timing=methods.Timing(window=4))
    with pytest.raises(InputError, match=r"needs a trace with window = 4, this one has \(2, 4\)"):
        replay(simulate(cluster, 20), method, problems.quadratic([1.0]))


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        # 4 workers with 10 visits each, 5 parameters of 4 bytes: losses up, leaders down.
        (methods.lsgd(), 40 * 4, 40 * 20),
        # Every second visit the overall leader comes down, too.
        (methods.lsgd(groups=2, global_every=2), 40 * 4, (40 + 20) * 20),
        (methods.lgd(policy=None), 40 * 4, 40 * 20),
        (methods.aeasgd(), 40 * 20, 40 * 20),
    ],
)
def test_bytes_are_those_of_losses_and_leaders(method, up, down):
    cluster = meet(Cluster(4, 1.0, bandwidth=20.0, message_bytes=20.0), method.timing)
    sizes = np.broadcast_to(cluster.message_bytes, 2)
    assert (40 * sizes).tolist() == [up, down]
    # Each visit takes the transfers and the second of the gradient.
    end = simulate(cluster, 40).frame["commit_time"].iloc[-1]
    assert end == pytest.approx(10 * (1 + sum(sizes) / 20) - sizes[1] / 20)


def gossip_cells(**options):
    """Return the cells of a study of gossip with the methods that run there."""
    usual = {"workers": 4, "steps": 20, "seeds": 1, "tune": (0.1,), "topology": "ring()"}
    config = gossip.Config(**usual | {"problem": "quadratic"} | options)
    return gossip.in_their_places(config, sweep(config, config.points()))


def test_an_all_reduce_is_a_collective(capsys):
    """It is the rival by default; the server's barrier has its own row, and a random latency leaves
    the all-reduce out.
    """
    ring = "batch_sgd(policy='barrier(collective=ring)')"
    options = {"methods": ("sgp", ring, "averaging", "downpour")}
    clusters = {
        (cell.values["topology"], method.name): cell.cluster_of(method)[0]
        for cell in gossip_cells(**options, latency="0.5")
        for method in cell.methods
    }
    assert [*clusters] == [
        ("ring()", "sgp"),
        ("all-reduce", "batch_sgd"),
        ("server", "averaging"),
        ("server", "downpour"),
    ]
    assert clusters["all-reduce", "batch_sgd"].collective_time == 2 * 3 * 0.5
    assert "left out" not in capsys.readouterr().err
    assert "barrier(collective=ring)" in str(gossip.Config().methods)
    gossip_cells(**options, latency="exponential(0.5)")
    message = "batch_sgd on all-reduce is left out: latency = exponential(mean=0.5)"
    assert message in capsys.readouterr().err


def test_a_slow_link_is_one_of_worker_0():
    """To its first neighbour, as a topology has it; to the server, of the latency and the
    bandwidth.
    """
    options = {"methods": ("sgp", "downpour"), "workers": 3, "latency": "0.5"}
    network = {"bandwidth": 8.0, "message_bytes": 2.0, "slow_link": 4.0}
    cells = gossip_cells(**options, **network)
    ring, server = (cell.cluster for cell in cells if cell.methods)
    assert str(ring.topology) == "slow_links(topology=ring(), links=[[0, 1, 4]])"
    assert server.ways[0].means == (2.0, 0.5, 0.5) and server.ways[0].transfer == (1.0, 0.25, 0.25)
    assert str(gossip_cells(**options)[0].cluster.topology) == "ring()"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": (0.1, 0.2)}, "split = 0.1: problem = 'quadratic' says"),
        ({"split": 0.1, "problem": "digits(split=0.2)"}, r"split = 0.1: problem = 'digits\(split"),
        ({"methods": ("downpour",)}, "downpour: none can be run on topology = ring()"),
    ],
)
def test_data_and_methods_that_do_not_suit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        gossip_cells(**{"topology": ("ring()",), "methods": ("sgp",)} | options)


# The traffic


def round_of(methods, **options):
    """Simulate three rounds of a method's cluster; return the seconds and the bytes of a round."""
    config = study.load("compare").Config(
        problem="quadratic", methods=methods, compute="1", **options
    )
    (cell,) = sweep(config, [{}])
    (method,) = cell.methods
    cluster, _ = cell.cluster_of(method)
    trace = simulate(cluster, 3 * cluster.workers)
    traffic = costs(cell, method, trace)
    first, *_, last = trace.frame["commit_time"].unique()
    return (last - first) / 2, 1e9 * traffic["gigabytes"] / 3, traffic["messages"]


@pytest.mark.parametrize(
    ("collective", "seconds", "sent"),
    [
        # 4 workers, 80 bytes at 40 bytes/s, .5 s a message. Six messages of a quarter, one after
        # the other.
        ("ring", 6 * (0.5 + 0.5), 2 * 3 * 80),
        ("tree", 4 * (2.0 + 0.5), 2 * 3 * 80),  # two levels up, two down
        # A half, a quarter, a quarter, a half.
        ("halving_doubling", 1.0 + 0.5 + 0.5 + 1.0 + 4 * 0.5, 4 * 1.5 * 80),
        ("shared_link", 4 * 2.0 + 0.5 + 4 * 2.0 + 0.5, 8 * 80),
        # A ring of two at each site, a ring of two between them, a message to the other at each.
        ("two_level", 2 * (1.0 + 0.5) + 2 * (1.0 + 0.5) + 2.5, 4 * 80 + 2 * 80 + 2 * 80),
    ],
)
def test_a_round_of_each_collective_by_hand(collective, seconds, sent):
    """Whether the cluster has the all-reduce or the method asks for it: a second of computing, then
    the all-reduce.
    """
    options = dict(workers=4, latency="0.5", bandwidth=40.0, message_bytes=80.0)
    if collective == "two_level":
        options["sites"] = (2, 2)
    policy = f"barrier(collective={collective})"
    for measured in (
        round_of(("batch_sgd",), **options, policy=policy),
        round_of((f"batch_sgd(policy='{policy}')",), **options),
    ):
        assert measured == (pytest.approx(1 + seconds), pytest.approx(sent), 24)


def test_a_lone_worker_has_no_network():
    far = dict(sites=(1, 2), far_latency="2", bandwidth=40.0, message_bytes=80.0)
    for method in ("sgd", "entropy_sgd"):
        window = methods.METHODS[method]().timing.window or 1
        measured = round_of((method,), workers=3, latency="0.5", service="0.25", **far)
        assert measured == (pytest.approx(window + 0.25), 0, 0)


def test_a_rule_needs_the_messages_that_an_all_reduce_adds():
    trace = simulate(Cluster(4, 1.0, policy="barrier(collective=ring)"), 8)
    with pytest.raises(InputError, match="an all-reduce adds the messages"):
        replay(trace, methods.robust(), problems.quadratic([1.0]))
