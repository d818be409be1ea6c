"""The character transformer: text and windows, network, learning, bad input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncsim import InputError
from asyncsim.problems import characters

TINY = {"batch_size": 4, "context": 8, "width": 8, "heads": 2}
KEY = jax.random.key(3)


def written(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_windows_follow_the_text(tmp_path):
    text = "".join(chr(ord("a") + i * i % 23) for i in range(200)) + "äöß"
    problem = characters(
        batch_size=2, text=written(tmp_path, text), context=6, stride=4, width=4, heads=1
    )
    alphabet = problem.config["alphabet"]
    assert alphabet == "".join(sorted(set(text))) and problem.config["characters"] == 203
    decoded = ["".join(alphabet[code] for code in window) for window in problem.train]
    # The last tenth, twenty characters, is the test: three windows that share one character each.
    assert decoded == [text[i : i + 7] for i in range(0, 183 - 6, 4)]
    assert problem.train.dtype == problem.test.dtype == np.int32
    tested = ["".join(alphabet[code] for code in window) for window in problem.test]
    assert tested == [text[183 + i : 190 + i] for i in (0, 6, 12)]
    assert characters(text=written(tmp_path, text), context=16, width=4).config["stride"] == 2


def reference_logits(params, window, heads, layers):
    """One window, place by place and head by head, in NumPy."""
    params = jax.tree.map(np.asarray, params)

    def norm(layer, x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5) * layer["scale"] + layer["bias"]

    def dense(layer, x):
        return x @ layer["weight"] + layer["bias"]

    def gelu(x):
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    stream = [params["characters"][code] + params["positions"][i] for i, code in enumerate(window)]
    for block in (params[f"block{i + 1}"] for i in range(layers)):
        q, k, v = np.split(
            np.array([dense(block["attention"], norm(block["norm1"], x)) for x in stream]),
            3,
            axis=1,
        )
        size = q.shape[1] // heads
        for place in range(len(stream)):
            taken = []
            for head in (slice(h * size, (h + 1) * size) for h in range(heads)):
                weight = np.exp(
                    [
                        q[place, head] @ k[other, head] / math.sqrt(size)
                        for other in range(place + 1)
                    ]
                )
                taken.append(weight / weight.sum() @ v[: place + 1, head])
            stream[place] = stream[place] + dense(block["attended"], np.concatenate(taken))
            hidden = gelu(dense(block["expand"], norm(block["norm2"], stream[place])))
            stream[place] = stream[place] + dense(block["contract"], hidden)
    return np.array([dense(params["last"], norm(params["norm"], x)) for x in stream])


def shaken(params):
    """The same parameters with biases and scales that do something."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf, float) + 0.3 * rng.normal(size=leaf.shape)),
        params,
    )


@pytest.mark.full
@pytest.mark.parametrize(("heads", "layers"), [(2, 2), (4, 11)])
def test_network_against_a_loop(float64, heads, layers):
    problem = characters(**TINY | {"heads": heads, "layers": layers})
    params = shaken(problem.init(KEY))
    batch = problem.train[:3]
    expected = []
    for window in batch:
        scores = reference_logits(params, window[:-1], heads, layers)
        expected.append(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(scores)), window[1:]])
    # As a replay has them: rebuilt from a flat vector, in which the blocks' order is that of their
    # names.
    params = jax.tree.unflatten(*reversed(jax.tree.flatten(params)))
    # The loop sees nothing after a place, so neither does the network.
    assert float(jax.jit(problem.loss)(params, batch, None)) == pytest.approx(
        np.mean(expected), rel=1e-11
    )
    evaluated = jax.jit(problem.evaluate)(params, None, batch)["loss"]
    assert float(evaluated) == pytest.approx(np.mean(expected), rel=1e-11)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short, 0 characters"),
        (b"a" * 89, "too short, 89 characters; its last tenth must hold more than context = 8"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"a\0" * 100, "holds zero bytes, so it is not text"),
    ],
)
def test_files_that_are_not_a_text_or_too_short(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        characters(**TINY, text=written(tmp_path, content))
    with pytest.raises(InputError, match="cannot be read"):
        characters(**TINY, text=tmp_path)
