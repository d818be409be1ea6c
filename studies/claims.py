"""Which published claims hold? A verdict on each, with the command that repeats its test.

    asyncsim study claims gem agn

The lists are gem, agn, lsgd, parle, gossip, robust, scaling and ringmaster; without any, all are
tested. Each claim is tested by commands of other studies, whose results are in ``evidence/``;
claims that need the same command share its results. A rule computes the verdict: holds, holds in
part, does not hold, undecided, or not testable here with the reason; where the source does not
state an option on which the answer depends, the verdict has the values that were tried. Differences
between seeds count if their 95 % confidence interval excludes equality. The table says how many
seeds a first look had, if more were run after it; where it decided the rule, only later seeds
count. Prints the claims, and writes them as claims.csv and as claims.md.

Small scale needs twenty minutes of processor time, about twelve minutes on two cores, on bundled
problems. --scale paper runs the published set-ups: MNIST and CIFAR-10, hours to days.
"""

import contextlib
import io
import shlex
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pandas as pd

from asyncsim.base.console import counted, wrapped
from asyncsim.base.errors import InputError
from asyncsim.base.files import write_text
from asyncsim.claims import LISTS, ClaimList, claims_of
from asyncsim.claims.claim import Claim, measured, verdict
from asyncsim.study import configure, results
from asyncsim.study.config import JobOptions, StudyConfig, check_values
from asyncsim.study.executor import Local
from asyncsim.study.finished import Finished, present, read
from asyncsim.study.jobs import Job, Result, Tables, measurement, run_jobs
from asyncsim.study.loading import without_group

#: The verdict on a claim whose runs have not ended.
UNFINISHED = "unfinished"
#: The table of the verdicts, and the same for pages.
TABLE, PAGE = "claims.csv", "claims.md"
#: Lengths beside which the steps have no effect.
_LENGTHS = ("time_budget", "epochs", "gradients")
#: Options of a set-up that the table shows.
_SETTING = ("problem", "workers", "seeds", "steps", *_LENGTHS, "window", "latency", "byzantine")
_WIDTH = 100


@dataclass(frozen=True)
class Config(JobOptions):
    """Options of the study of claims."""

    first: ClassVar[str] = "lists"
    example: ClassVar[str] = "gem agn"

    lists: tuple[ClaimList, ...] = LISTS
    """Lists of claims to test; their names may stand without the option."""
    scale: Literal["small", "paper"] = "small"
    """Set-ups of the tests: minutes on bundled problems, or the published ones."""

    def check(self) -> None:
        """Check the options; see `JobOptions.check`."""
        super().check()
        check_values("lists", self.lists)
        if self.executor != "local":
            raise InputError(
                f"executor = {self.executor!r}: the claims' studies run one after the other; leave "
                "it out, or run their commands with it"
            )


SCALES = {"small": Config(), "paper": Config(scale="paper")}


def run(config: Config) -> Result:
    """Run the commands of all claims, then judge them; see `asyncsim.study.jobs.run_jobs`."""
    config.check()
    claims = [(name, claim) for name in config.lists for claim in claims_of(name)]
    commands: dict[str, None] = {}
    for _, claim in claims:
        if not isinstance(tests := claim.commands(config.scale), str):
            commands |= dict.fromkeys(tests)
    if config.scale == "paper":
        _require_data(commands)
    jobs = [_job(config, command) for command in commands]

    def conclude(folder: Path, summary: pd.DataFrame) -> None:
        table = pd.DataFrame([_row(folder, config.scale, *entry) for entry in claims])
        write_text(folder / PAGE, page(table))
        present(folder, {TABLE: table}, report(table), verdict=_counts(table))

    record = config.options_record()
    return run_jobs("claims", config, record, jobs, contextlib.nullcontext(Local()), conclude)


def _require_data(commands: Iterable[str]) -> None:
    """Raise InputError if the data of a command's problem cannot be loaded."""
    configs = [_configured(command)[1] for command in commands]
    problems = {config.problem: config for config in configs if isinstance(config, StudyConfig)}
    for config in problems.values():
        config.at().make_problem()


def _configured(command: str, *options: str) -> tuple[Any, Any]:
    """Return the study of a command and its config."""
    name, *typed = without_group(shlex.split(command))
    return configure(name, [*typed, *options], check=True)


def _job(config: Config, command: str) -> Job:
    return measurement(
        command,
        _tested,
        *(command, config.device),
        folder="evidence",
        labels={"command": command},
        in_folder=True,
    )


def _place(command: str) -> str:
    """Return the folder of a command's results, inside the study's folder."""
    return f"evidence/{command.split()[0]}-{zlib.crc32(command.encode()):08x}"


def _tested(folder: Path, command: str, device: str) -> Tables:
    """Run a command, or complete an interrupted one; its printed text is only on its page."""
    place = folder / _place(command)
    unfinished = (place / results.CONFIG).exists()
    study, config = _configured(command, "--resume" if unfinished else "--out", str(place))
    if isinstance(config, JobOptions):
        typed, config = config.command, replace(config, device=device)  # type: ignore[arg-type]  # a choice
        object.__setattr__(config, "command", typed)
    with contextlib.redirect_stdout(io.StringIO()):
        study.run(config)
    return {results.SUMMARY: [{"command": command, "folder": _place(command)}]}


def _row(folder: Path, scale: str, name: str, claim: Claim) -> dict[str, Any]:
    """Judge a claim by the results of its commands."""
    commands = claim.commands(scale)
    row = {
        "list": name,
        "claim": claim.claim,
        "source": claim.source,
        "asked_by": "this project" if claim.ours else "the source",
        **dict.fromkeys(("setting", "measured", "verdict", "command"), ""),
    }
    if isinstance(commands, str):
        return row | {"verdict": f"not testable here: {commands}"}
    row["command"] = " && ".join(f"asyncsim study {command}" for command in commands)
    for command in commands:
        place = folder / _place(command)
        if not (place / results.SUMMARY).exists():
            return row | {"verdict": UNFINISHED}
        if unfinished := results.unfinished(place):
            return row | {"verdict": f"{UNFINISHED} ({unfinished})"}
    try:
        evidence = [read(folder / _place(command), command.split()[0]) for command in commands]
        findings = claim.findings(evidence, scale)
    except InputError as error:
        return row | {"verdict": f"not testable here: {error}"}
    except (LookupError, ValueError) as error:  # rows of failed runs are absent
        return row | {"verdict": f"not testable here: incomplete results ({error})"}
    return row | {
        "setting": _setting(evidence[0], claim, scale),
        "measured": measured(findings),
        "verdict": verdict(findings),
    }


def _setting(evidence: Finished, claim: Claim, scale: str) -> str:
    """Describe the set-up of a study's results, and which seeds count."""
    parts = []
    for name in _SETTING:
        value = evidence.config.get(name)
        if value in (None, 0, "constant(0)") or name == claim.assumption:
            continue
        if name == "steps" and any(evidence.config.get(length) for length in _LENGTHS):
            continue
        if name == "seeds" and claim.looked and scale == "small":
            first = f"a first look had {claim.looked}"
            last = f"{claim.looked} to {value - 1}" if claim.later_seeds else value
            parts.append(f"seeds {last} ({first})")
            continue
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(text if name == "problem" else f"{name.replace('_', ' ')} {text}")
    return ", ".join(parts)


def report(table: pd.DataFrame) -> str:
    """Format the claims for printing: verdict and numbers below each claim."""
    lines = []
    for name, rows in table.groupby("list", sort=False):
        lines += [str(name), "-" * len(str(name))]
        for row in rows.itertuples():
            lines += [wrapped(_asked(row), _WIDTH)]
            for text in (row.verdict, row.measured, row.command):
                lines += [f"    {text}"] if text else []
            lines.append("")
    return "\n".join(lines)


def _asked(row: Any) -> str:
    """Return a claim with its source; questions of this project say so."""
    ours = ", a question of this project" if row.asked_by == "this project" else ""
    return f"{row.claim} [{row.source}{ours}]"


def _counts(table: pd.DataFrame) -> str:
    """Count the claims that hold; in a second line, the other verdicts."""
    counts = table["verdict"].str.partition(":")[0].str.partition(" (")[0].value_counts()
    holds = counts.pop("holds") if "holds" in counts else 0
    others = ", ".join(f"{verdict_text}: {count}" for verdict_text, count in counts.items())
    return f"{holds} of {counted(len(table), 'claim')} hold\n{others}".rstrip()


def page(table: pd.DataFrame) -> str:
    """Format the claims as tables of Markdown, one for each list."""
    parts = []
    for name, rows in table.groupby("list", sort=False):
        parts += [f"## {name}", "", "| claim | set-up | measured | verdict |", "|---|---|---|---|"]
        for row in rows.itertuples():
            command = f"`{row.command}`" if row.command else ""
            cells = (
                _asked(row),
                "<br>".join(filter(None, [row.setting, command])),
                row.measured,
                f"**{row.verdict}**",
            )
            parts.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)
