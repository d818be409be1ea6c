"""Groups of tensors, and reads whose shards have different versions."""

import jax
import numpy as np
import pytest

from asyncsim import problems
from asyncsim.base.errors import InputError
from asyncsim.problems.partition import partition


def shapes(problem):
    return jax.eval_shape(problem.init, jax.random.key(0))


DIGITS = shapes(problems.digits(hidden=(64, 64, 64)))


def test_groups_of_tensors_partition_the_flat_vector():
    assert partition(DIGITS, ["0,2", "1", "[3]"]) == (
        ("0,2", "1", "[3]"),
        (0, 4160, 8320, 12480, 13130),
        (0, 1, 0, 2),
    )
    assert partition(DIGITS, ["[0]['weight'],[0]['bias']", "1,2,3"]).bounds == (0, 4160, 13130)
    assert partition(DIGITS, 3, by_layer=True).names == ("0", "1", "2,3")
    six = partition(DIGITS, 6)
    assert len(six.names) == 6 and np.diff(six.bounds).max() == 4160


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["0", "1", "2"], "tensor 3.bias is in no group"),
        (["0", "0.weight", "1", "2", "3"], "tensor 0.weight is in '0' and in '0.weight'"),
        (["0", "1", "2", "3", "4"], "no tensor of the problem is named '4'"),
        (9, "from 1 to 8, as the problem has 8 tensors"),
        (0, "from 1 to 8"),
    ],
)
def test_groups_that_are_no_partition_are_refused(groups, message):
    with pytest.raises(InputError, match=message):
        partition(DIGITS, groups)
