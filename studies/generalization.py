"""Whether many epochs overfit: training and test loss of GEM, and of SGD on one worker.

Figure 5 of the GEM paper: 30 passes through the training data, by all workers together with GEM and
by one worker with momentum SGD, so that both compute the same number of gradients. The paper calls
the test data validation data, and its training loss is of minibatches, with dropout. It names no
number of workers; 5 to 10 come nearest.

At paper scale about 250,000 commits of MNIST's network, evaluated about 30 times a run: an hour on
two cores.
"""

from asyncsim.base.errors import InputError
from asyncsim.problems import Problem
from asyncsim.study.comparison import Comparison, final_loss
from asyncsim.study.ranking import Measure
from asyncsim.study.sweep import ComparisonConfig, preset

Config, SCALES = preset(
    small={"workers": 10, "epochs": 30, "methods": ("gem", "sgd"), "evaluate_every": None},
    paper={"problem": "mnist", "workers": (5, 10)},
)


def measure(config: ComparisonConfig, problem: Problem) -> Measure:
    """Compare by the minibatch loss at the end; raise InputError without test data."""
    if problem.test is None:
        raise InputError(
            f"problem = {problem.name!r}: has no test data to generalize to; choose another"
        )
    return final_loss(config, problem)


run = Comparison("generalization", measure=measure).run
