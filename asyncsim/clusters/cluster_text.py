"""A cluster in words, for tables, titles, notebooks and `repr`: the entries that differ from the
defaults.
"""

from dataclasses import fields
from typing import Any

from asyncsim.base.console import counted
from asyncsim.base.declared import Value
from asyncsim.clusters.laws import Law, brief
from asyncsim.clusters.network import PerWorker, is_matrix
from asyncsim.clusters.topologies import Topology

#: With more different laws, their number and the range of their means are shown.
_MOST_LAWS = 3
#: Characters above which a value is cut.
_LONGEST = 80
#: Entries that may be a pair: the way up and the way down.
_DIRECTED = ("latency", "bandwidth", "message_bytes", "far_latency", "far_bandwidth")
#: Entries whose words are not their name and value.
_PHRASES = {
    **dict.fromkeys(("protocol", "policy", "failures", "rollouts"), "{}"),
    "bandwidth": "bandwidth {} (bytes/s)",
    "message_bytes": "messages of {} bytes",
    "shared_bandwidth": "shared bandwidth",
    "far_bandwidth": "far bandwidth {} (bytes/s)",
    "exclusive": "in two visits",
    "discipline": "served {}",
    "topology": "no server, {}",
    "sites": "sites of {}",
    "far_every": "beyond its site at every visit {}",
    "servers": "{} servers",
}


def entries(cluster: Any) -> dict[str, str]:
    """Return the entries that differ from the defaults, and the form of the visits, as texts."""
    always = ("protocol", "discipline") if cluster.topology is None else ()
    texts = {}
    for entry in fields(cluster):
        value = getattr(cluster, entry.name)
        if entry.name in always or value != entry.default:
            is_pair = isinstance(value, tuple) and not is_matrix(value) and entry.name in _DIRECTED
            text = " up and ".join(map(_text, value)) + " down" if is_pair else _text(value)
            texts[entry.name] = text
    return texts


def parts(cluster: Any) -> list[str]:
    """Return the parts of `describe`, for lines that break between them."""
    texts = entries(cluster)
    del texts["workers"]
    if cluster.policy.collective is not None:
        del texts["protocol"], texts["discipline"]
    return [
        counted(cluster.workers, "worker"),
        *(
            _PHRASES.get(name, f"{name.replace('_', ' ')} {{}}").format(text)
            for name, text in texts.items()
        ),
    ]


def describe(cluster: Any, attack: Any = None) -> str:
    """Describe a cluster in one line.

    For example ``100 workers, compute gamma(mean=1, cv=0.2), service 0.005 s, exchange, served
    fifo``. ``attack``: of the replays.
    """
    return ", ".join([*parts(cluster), *attack_text(attack)])


def attack_text(attack: Any) -> list[str]:
    """Name an attack, of its type or a text; empty without one."""
    return [f"attack {getattr(attack, 'text', attack)}"] if attack else []


def _text(value: Any) -> str:
    """Write a value in a few words: laws by family and mean, many values by their range."""
    if isinstance(value, Law):
        return brief(value)
    if isinstance(value, PerWorker) or is_matrix(value):
        rows = value.values if isinstance(value, PerWorker) else value
        return f"{_range(rows)} by {'worker' if isinstance(value, PerWorker) else 'pair'}"
    if isinstance(value, tuple):
        distinct, of_laws = list(dict.fromkeys(value)), isinstance(value[0], Law)
        is_listed = isinstance(value[0], Value | str) and not of_laws
        if len(distinct) > _MOST_LAWS and not is_listed:
            return f"{len(distinct)} different, {_range(value)}"
        if len(value) > len(distinct) and of_laws:
            return " + ".join(f"{value.count(entry)} \u00d7 {_text(entry)}" for entry in distinct)
        return (", " if is_listed else " + ").join(map(_text, value))
    if isinstance(value, Value) and not isinstance(value, Topology):
        return str(value)
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = repr(value) if isinstance(value, Topology) else text
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _range(rows: Any) -> str:
    """Return the range of numbers, or of the means of laws (s), in rows of one or several."""
    flat = [x for row in rows for x in (row if isinstance(row, tuple) else (row,)) if x]
    unit = " s" if isinstance(flat[0], Law) else ""
    numbers = [entry.mean if isinstance(entry, Law) else entry for entry in flat]
    return f"{min(numbers):.3g} to {max(numbers):.3g}{unit}"
