"""The call syntax that laws, policies, methods and problems share: read, split, bound, and never
more than refused.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncsim import InputError
from asyncsim.base.calls import Call, bind, form_of, read, split
from asyncsim.clusters.laws import parse
from asyncsim.clusters.policy import as_policy
from asyncsim.methods import METHODS
from asyncsim.problems import PROBLEMS
from asyncsim.study.entries import entry_of, swept


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("-0.5", -0.5),
        ("None", None),
        ("'a, b'", "a, b"),
        ("[1] * 2 + [x]", [1, 1, Call("x")]),
        ("f()", Call("f", brackets=True)),
        (
            "f(1, b=g(c=h))",
            Call("f", (1,), (("b", Call("g", (), (("c", Call("h")),), True)),), True),
        ),
    ],
)
def test_what_texts_stand_for(text, value):
    assert read(text, "a thing", "f(1)") == value
    if isinstance(value, Call):
        assert str(value) == text


@pytest.mark.parametrize(
    ("texts", "entries"),
    [
        ("a,b", ["a", "b"]),
        (("a, ", "b(c=[1, 2], d='x,y')", 3), ["a", "b(c=[1, 2], d='x,y')", 3]),
        ("a(b, c", ["a(b, c"]),
        (")a,b", [")a", "b"]),
        ("'a,b", ["'a,b"]),
        (" , ", []),
    ],
)
def test_texts_are_split_outside_of_brackets(texts, entries):
    assert split(texts) == entries


def test_forms_and_arguments():
    def function(a, b=2, *others, c=None, **more):
        pass

    assert form_of(function) == "function(a, b=2, c)"
    assert bind(Call("function", (1,), (("c", 3),)), function, "x") == {"a": 1, "c": 3}
    with pytest.raises(InputError, match=r"^x: a missing; write function\(a, b=2, c\)$"):
        bind(Call("function"), function, "x")
    with pytest.raises(InputError, match=r"^x: a is given twice"):
        bind(Call("function", (1,), (("a", 1),)), function, "x")


def test_entries_with_several_lists_are_all_combinations():
    entry = entry_of("methods", "gem(kappa=[1, 2], momentum=[0.5, 0.9], variant=paper)", METHODS)
    found = [dict(one.arguments) for one in swept(entry)]
    assert [(one["kappa"], one["momentum"]) for one in found] == [
        (1, 0.5),
        (1, 0.9),
        (2, 0.5),
        (2, 0.9),
    ]
    assert {one["variant"] for one in found} == {"paper"}


#: Pieces that texts of users are made of, and what breaks parsers.
PIECES = st.sampled_from(
    [
        *"()[]{},=*+-.:'\" /\\\n\0",
        "gem",
        "kappa",
        "digits",
        "x.py:f",
        "gamma",
        "first_of",
        "2",
        "1e9",
        "None",
        "lambda",
        "**",
    ]
)


@settings(max_examples=60)
@given(st.lists(PIECES, max_size=12).map("".join))
@example("-" * 5_000 + "1")
@example("gem(" * 500)
@example("[[" * 50 + "]]" * 50)
@example("gem(kappa=" + "9" * 5_000 + ")")
def test_texts_are_read_or_refused(text):
    for reader in (
        parse,
        as_policy,
        split,
        lambda one: entry_of("methods", one, METHODS),
        lambda one: entry_of("problem", one, PROBLEMS),
    ):
        try:
            reader(text)
        except InputError as error:
            assert 0 < len(str(error)) < 1_500
