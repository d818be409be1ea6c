"""``asyncsim cite``: every method has the papers that its docstring names."""

import json
import re
from pathlib import Path

import pytest

import asyncsim
from asyncsim.__main__ import main
from asyncsim.methods import METHODS
from asyncsim.runs.citations import SOFTWARE, bibtex, references

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_the_papers_of_its_docstring(method):
    entries = references()[method]
    sources = " ".join(METHODS[method].__doc__.partition("References")[2].split())
    assert entries or "no paper" in METHODS[method].__doc__
    for key, entry in entries.items():
        assert entry.count("{") == entry.count("}")
        year = re.search(r"year = \{(\d{4})\}", entry)[1]
        author = re.search(r"author = \{\{?([^{}]*?)(?:,| and|\}|$)", entry)[1]
        assert key.startswith(re.sub(r"\W", "", author.lower()) + year) and author in sources
        assert re.search(r"title = \{\{.{5,}\}\}", entry) and year in sources
    numbers = set(re.findall(r"eprint = {(.*)}", "".join(entries.values())))
    assert numbers == set(re.findall(r"arXiv (\d{4}\.\d{4,5})", sources))


def test_the_entries_of_methods(capsys):
    assert main(["cite", "gem", "lgd", "gem"]) == 0
    assert (
        capsys.readouterr().out
        == f"""% gem: hermans2018gradient
% lgd: teng2019leader

{SOFTWARE}

@misc{{hermans2018gradient,
  title = {{{{Gradient energy matching for distributed asynchronous gradient descent}}}},
  author = {{Hermans, Joeri R. and Louppe, Gilles}},
  year = {{2018}},
  eprint = {{1805.08469}},
  archivePrefix = {{arXiv}},
}}

@inproceedings{{teng2019leader,
  title = {{{{Leader stochastic gradient descent for distributed training of deep learning \
models}}}},
  author = {{Teng, Yunfei and Gao, Wenbo and Chalus, Fran{{\\c{{c}}}}ois and Choromanska, Anna and \
Goldfarb, Donald and Weller, Adrian}},
  booktitle = {{Advances in Neural Information Processing Systems}},
  year = {{2019}},
  eprint = {{1905.10395}},
  archivePrefix = {{arXiv}},
}}
"""
    )


def test_the_entries_of_a_folder_of_results(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"methods": ["gem(kappa=2)", "mine\n@evil"]}))
    text = bibtex([str(tmp_path)])
    assert "hermans2018gradient,\n" in text and "% mine?@evil: no paper is known" in text
    assert bibtex([]) == SOFTWARE and f"version = {{{asyncsim.__version__}}}" in SOFTWARE
    assert SOFTWARE in (DOCS.parent / "README.md").read_text()
