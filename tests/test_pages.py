"""The page of a finished study and the animation: what they hold and refuse, and how they behave in
a browser.
"""

import base64
import html
import itertools
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_study import TOY

from asyncsim import Gamma, Rollouts, Run, methods, problems, recorders, replay, simulate, study
from asyncsim.__main__ import main
from asyncsim.base.errors import InputError
from asyncsim.clusters.cluster import Cluster
from asyncsim.pages import page
from asyncsim.pages.film import film, frame_times, on_screen, scale
from asyncsim.pages.timeline import timeline
from asyncsim.runs import known
from asyncsim.study.columns import titled
from asyncsim.study.finished import present
from asyncsim.traces.phases import IN_WORDS, phases

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium, Debian's package, which is not installed"
)


@pytest.fixture(scope="module")
def animated(tmp_path_factory):
    base = tmp_path_factory.mktemp("animated")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        patch.setenv("ASYNCSIM_INDEX", str(base / "index"))
        options = (*TOY, "--workers=12", "--steps=30", "--methods", "downpour", "gem", "--animate")
        assert study.main(["compare", *options, "--latency", "0.2"]) == 0
        known.tag(base / "results" / "compare", "x", "</script><script>window.hacked = 1</script>")
        yield base / "results" / "compare"


def data_of(path: Path) -> dict:
    (text,) = re.findall(
        r'<script type="application/json" id="data">\n(.*?)\n</script>', path.read_text(), re.DOTALL
    )
    return json.loads(text)


def in_a_browser(path: Path, script: str, tmp_path: Path, *options: str) -> dict:
    """Open a page and run a script in it that sets ``result``; return that, without an error of the
    page or on the console.
    """
    probe = (
        "<script>window.failed = []; window.onerror = (why) => failed.push(String(why));</script>",
        "<script>asyncsimReady.then(async () => { let result = {}; "
        f"{script}; const told = document.createElement('pre'); told.id = 'told';"
        "told.textContent = JSON.stringify({...result, failed}); "
        "document.body.appendChild(told); });</script>",
    )
    copy = tmp_path / "page.html"
    text = path.read_text().replace("<title>", f"{probe[0]}<title>", 1)
    copy.write_text(text.replace("</body>", f"{probe[1]}</body>"))
    quiet = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --disable-quic --enable-logging=stderr "
        "--virtual-time-budget=20000 --dump-dom"
    )
    program = [CHROMIUM, *quiet.split(), f"--user-data-dir={tmp_path / 'browser'}", *options]
    program.append(copy.as_uri())
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    (told,) = re.findall(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert [line for line in errors if "willReadFrequently" not in line] == []
    result = json.loads(html.unescape(told))
    assert result.pop("failed") == []
    return result


def test_a_page_holds_the_study_and_nothing_from_elsewhere(animated):
    path = animated / "report.html"
    text, data = path.read_text(), data_of(path)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert text.count("://") == 1  # in the comment of the library
    assert data["title"] == "compare: quadratic"
    assert data["question"][0].startswith("Which method is best")
    (table,) = [part for part in data["answer"] if "rows" in part]
    names = pd.DataFrame(table["rows"], columns=table["columns"])["method"]
    assert {name.split()[-1] for name in names} == {"downpour", "gem"}
    assert data["command"].startswith("asyncsim study compare --workers=2")
    assert [name for name, _, _ in data["figures"]] == ["curves"]
    summary = data["tables"][-1]
    words = dict(zip(summary["columns"], summary["words"], strict=True))
    assert (summary["name"], words["train_loss"]) == ("summary.csv", "training loss")
    films = {film["title"]: unpacked(film["places"]) for film in data["animation"]["films"]}
    assert sorted(films) == ["downpour, seed 0", "gem, seed 0"]
    assert all(len(places[axis]) == 400 * 12 for places in films.values() for axis in "xy")
    # Figures are images, apart from the page.
    assert page.write_page(animated).read_text().count("<svg") == 0


def test_a_report_is_printed_and_stands_on_the_page_whole(mine, capsys):
    """In a pipe a table fits 100 characters; the page has all columns."""
    columns = {f"column {i}": [1.0, 20.0] for i in range(12)}
    wide = pd.DataFrame({"method": ["sgd", "adsgd"], **columns})
    verdicts = ["a: sgd is best\nnot compared: adsgd", "b: one seed: no order"]
    present(mine, {}, "about", titled(wide), "", "below", verdict=verdicts)
    out = capsys.readouterr().out
    assert out == (mine / "report.txt").read_text()
    head, sgd, _, further, *rest = out.splitlines()[1:]
    assert sgd.startswith("sgd         1.00") and 88 < len(head) <= 100
    assert further == "further columns in the files: column 9, column 10, column 11"
    first, second = (f"verdict: {text}".splitlines() for text in verdicts)
    assert rest == ["below", *first, *second]
    data = data_of(page.write_page(mine))
    assert data["verdict"] == "a: sgd is best\nb: one seed: no order"
    text, about, table, end = data["answer"]
    assert [part["text"] for part in (text, about, end)] == [verdicts[0], "about", "below"]
    rows = [["sgd", *["1.00"] * 12], ["adsgd", *["20.0"] * 12]]
    assert table == {"columns": list(wide), "rows": rows}


@pytest.fixture
def mine(animated, tmp_path):
    """A copy of the study."""
    return shutil.copytree(animated, tmp_path / "mine")


@pytest.mark.parametrize(
    ("verdicts", "parts"),
    [
        ("a", []),
        ([1], [{"text": "a"}]),
        ([], [{"columns": ["a", "b"], "rows": [["1"]]}, {"text": 3}, {}]),
        ([], [{"columns": "a", "rows": 1}]),
    ],
)
def test_a_strangers_report_is_left_out(verdicts, parts, mine):
    (mine / "report.json").write_text(json.dumps({"verdicts": verdicts, "parts": parts}))
    data = data_of(page.write_page(mine))
    assert data["verdict"] is None and data["answer"] == []


def test_the_text_of_a_stranger_ends_no_script_and_an_infinity_is_a_text(mine):
    config = json.loads((mine / "config.json").read_text())
    config |= {"problem": "</script><script>alert(1)</script>", "command": ["$(rm -rf x)", "<b>"]}
    config["split"] = [0.1, float("inf")]
    (mine / "config.json").write_text(json.dumps(config))
    (mine / "odd.csv").write_text("a,b\n<img src=x onerror=alert(1)>,2\n1\n")
    text, data = page.write_page(mine).read_text(), data_of(mine / "report.html")
    assert text.count("</script>") == 3 and "Infinity]" not in text
    assert data["title"] == f"compare: {config['problem']}"
    assert "'$(rm -rf x)' '<b>'" in data["command"] and data["config"]["split"] == [0.1, "inf"]
    (odd,) = [table for table in data["tables"] if table["name"] == "odd.csv"]
    assert odd["rows"] == [["<img src=x onerror=alert(1)>", "2"]]


@pytest.mark.parametrize(
    ("method", "force"),
    [(methods.lsgd(), "leader"), (methods.aeasgd(), "spring"), (methods.downpour(), "")],
)
def test_forces_are_those_of_the_method(method, force):
    trace = simulate(Cluster(4, "gamma(1, 0.3)"), 40)
    problem, record = problems.quadratic([1.0, 0.1], noise=0.5), [recorders.positions()]
    run = replay(trace, method, problem, record=record, progress=False)
    times = frame_times([trace], 25)
    drawn = film(run, trace, times, "a run")
    assert drawn.force == force
    losses = {}
    for frame, now in enumerate(times):
        for row in run.commits[run.commits["commit_time"] <= now].itertuples():
            losses[row.worker] = row.loss
        expected = min(losses, key=losses.get) if losses and force == "leader" else -1
        assert drawn.leader[frame] == expected
    data = page.animation([("a run", run, trace)])
    assert ("present leader" in data["about"]) == (force == "leader")


def test_the_distances_of_a_film_are_those_of_the_vectors():
    """Against the whole vectors of a replay: exact where there are as many coordinates as
    parameters.
    """
    trace = simulate(Cluster(5, 1.0, service=0.01, latency=0.1), commits=60)
    problem, names = (
        problems.quadratic(np.linspace(0.1, 1, 32), noise=0.1),
        tuple(f"c{i}" for i in range(32)),
    )
    vectors = recorders.Recorder(
        names, lambda state, commit: (state, list(commit.central)), shared=True
    )
    record = [recorders.positions(32), vectors]
    run = replay(trace, methods.downpour(0.2), problem, record=record, precision="float64")
    times = frame_times([trace], 40)
    drawn = film(run, trace, times, "downpour")
    central, frame = run.commits[[*names]].to_numpy(), trace.frame
    for (at, now), worker in itertools.product(enumerate(times), range(5)):
        done = int((frame["commit_time"] <= now).sum())
        own = frame[(frame["worker"] == worker) & (frame["read_time"] <= now)]
        version = int(own["read_version"].iloc[-1])
        # Computing, from a version that is recorded.
        if done and version and own.index[-1] >= done:
            distance = np.linalg.norm(central[version - 1] - central[done - 1])
            offset = np.linalg.norm(drawn.offset[at, worker])
            np.testing.assert_allclose(offset, distance, rtol=1e-9)
    shown = np.linalg.norm(on_screen(drawn.offset, *scale([drawn])), axis=-1)
    assert np.nanmax(shown) <= 1.1


def test_sketches_keep_lengths():
    trace, record = simulate(Cluster(4, 1.0), 40), [recorders.positions(), recorders.energy()]
    run = replay(trace, methods.downpour(0.1), problems.digits(), record=record)
    positions = np.r_[np.zeros((1, 48)), run.commits.filter(like="position_").to_numpy()]
    moves = positions[1:] - positions[trace.frame["read_version"]]
    ratio = np.linalg.norm(moves, axis=1) / np.sqrt(2 * run.commits["central_energy"])
    assert ratio.min() > 0.6 and ratio.max() < 1.4 and abs(ratio.mean() - 1) < 0.15


def test_the_caption_says_no_more_than_there_is():
    """Losses that are beyond the axis; without recorded positions there is no animation."""
    trace, problem = simulate(Cluster(3, 1.0), commits=30), problems.quadratic([1.0, 2.0])

    def about(rate, *record):
        run = replay(trace, methods.downpour(rate), problem, record=record)
        return page.animation([("x", run, trace)])["about"]

    texts = [about(rate, recorders.positions()) for rate in (0.1, 1.2)]
    assert all("direction is taken in the plane" in text for text in texts)
    assert ["others at the edge" in text for text in texts] == [False, True]
    with pytest.raises(InputError, match="x: has no positions; run the study with --animate"):
        about(0.1)


@browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 500])  # 500 is the least of Chromium
def test_a_page_fits_its_window(width, dark, mine, tmp_path):
    """Sentences wrap; only parts that scroll are wider than the page."""
    report = {"verdicts": [], "parts": [{"text": "A long sentence. " * 40}]}
    (mine / "report.json").write_text(json.dumps(report))
    path = page.write_page(mine)
    script = """
      const right = document.body.getBoundingClientRect().right;
      const scrolls = (node) => node.closest(".scroll, pre, .hidden") !== null;
      result.width = innerWidth;
      const beyond = (node) => !scrolls(node) && node.getBoundingClientRect().right > right + 1;
      const clipped = [...document.body.querySelectorAll("*")].filter(beyond);
      result.clipped = clipped.map((node) => node.outerHTML.slice(0, 90));
      const said = document.querySelector("pre.sentences");
      result.dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
      result.wraps = getComputedStyle(said).whiteSpace === "pre-wrap"
        && said.scrollWidth <= said.clientWidth;
    """
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    result = in_a_browser(path, script, tmp_path, f"--window-size={width},900", *options)
    assert result == {"width": width, "clipped": [], "dark": dark, "wraps": True}


@browser
def test_the_page_in_a_browser(animated, tmp_path):
    """No error and no network; tables sort; the animation plays, scrubs, and shows the loss of the
    run's table.
    """
    script = """
      result.title = document.title;
      result.hacked = window.hacked === 1;
      result.hint = document.querySelector("#answer .more-columns").textContent;
      const isWrong = (node) =>
        (node.scrollWidth > node.clientWidth) === (node.previousSibling.textContent === "");
      result.wrongHints = [...document.querySelectorAll("#answer .scroll")].filter(isWrong).length;
      const heads = [...document.querySelectorAll("th")];
      const head = heads.find((head) => head.textContent === "training loss");
      const rows = head.closest("table").tBodies[0].rows;
      const cells = () => [...rows].map((row) => row.cells[head.cellIndex].title);
      head.firstChild.click(); result.up = cells().map(Number);
      head.firstChild.click(); result.down = cells().map(Number);
      const scrub = document.getElementById("scrub");
      result.second = document.querySelectorAll("figcaption strong")[1].textContent.split(",")[0];
      result.losses = [];
      for (const part of [0, 0.3, 0.7, 1]) {
        scrub.value = part * scrub.max; scrub.oninput();
        result.losses.push([parseFloat(document.getElementById("time").textContent),
                            document.getElementById("status-1").dataset.loss]);
      }
      const canvas = document.querySelector(".stage canvas");
      const context = canvas.getContext("2d");
      const pixels = () => context.getImageData(0, 0, canvas.width, canvas.height).data.join();
      const last = pixels();
      scrub.value = 0.1 * scrub.max; scrub.oninput(); result.moves = pixels() !== last;
      scrub.value = 0; scrub.oninput();
      const play = document.getElementById("play");
      play.click(); result.plays = play.textContent;
      result.rate = drawAll();
    """
    page = animated / "report.html"
    found = in_a_browser(page, script, tmp_path, "--window-size=1200,900")
    assert not found["hacked"] and found["wrongHints"] == 0
    assert re.fullmatch(r"scroll for \d+ more columns", found["hint"])
    assert found["title"] == "compare: quadratic" and found["moves"] and found["plays"] == "Pause"
    assert found["up"] == sorted(found["up"]) and found["down"] == sorted(
        found["down"], reverse=True
    )
    evaluations = Run.load(animated / "runs" / f"{found['second']}-seed0").evaluations
    for time, loss in found["losses"]:
        known = evaluations[evaluations["commit_time"] <= time + 1e-2]["train_loss"]
        assert float(loss) == known.iloc[-1]


@browser
def test_a_topology_moves_in_a_browser(tmp_path):
    options = "--workers=4 --steps=8 --seeds=1 --problem=quadratic --tune 0.1 --topology=ring()"
    assert study.main(["gossip", *options.split(), "--animate", "--methods", "sgp"]) == 0
    script = (
        "const s = document.getElementById('scrub'); s.value = 100; s.oninput(); result.rate = "
        "drawAll();"
    )
    in_a_browser(Path("results/gossip/report.html"), script, tmp_path)


def test_a_timeline_shows_the_read_and_staleness_of_each_commit():
    """Unpack the page's integers and compare them with the trace, of each kind of policy."""
    clusters = {
        "asynchronous": Cluster(5, Gamma(1.0, 0.3), service=0.05, latency=0.1),
        "barrier": Cluster(5, Gamma(1.0, 0.3), service=0.05, policy="barrier()"),
        "gossip": Cluster(5, Gamma(1.0, 0.3), latency=0.1, topology="ring"),
    }
    for name, cluster in clusters.items():
        trace = simulate(cluster, commits=80)
        data = timeline(name, trace)
        columns = unpacked(data["columns"])
        frame, tick = trace.accepted.frame, data["end"] / data["ticks"]
        time = np.cumsum(columns["time"]) * tick
        version = np.cumsum(columns["version"])
        np.testing.assert_array_equal(columns["worker"], frame["worker"])
        np.testing.assert_array_equal(columns["staleness"], frame["staleness"])
        np.testing.assert_array_equal(version - columns["read"], frame["read_version"])
        np.testing.assert_allclose(time, frame["commit_time"], atol=2 * tick)
        np.testing.assert_allclose(time - columns["age"] * tick, frame["read_time"], atol=2 * tick)
        intervals = phases(trace, range(5))
        for number, phase in enumerate(IN_WORDS):
            table = intervals[intervals["phase"] == phase]
            duration = np.bincount(table["worker"], table["end"] - table["begin"], 5)
            lane = np.cumsum(columns[f"lane{number}"])
            packed = np.bincount(lane, columns[f"length{number}"] * tick, 5)
            np.testing.assert_allclose(packed, duration, atol=1e-3)


def test_without_a_server_a_timeline_shows_distances_from_the_mean():
    """The replica before the last commit is that of a run with one commit fewer."""
    cluster = Cluster(
        4, Gamma(1.0, 0.3), latency=0.1, topology="ring", policy='neighbours(mix="beside")'
    )
    problem, method = problems.quadratic([1.0, 0.3], noise=0.5), methods.dpsgd(0.2)
    traces = [simulate(cluster, commits=commits) for commits in (40, 41)]
    before, run = (
        replay(trace, method, problem, record=[recorders.energy()], progress=False)
        for trace in traces
    )
    data = timeline("gossip", traces[1], run)
    distances = unpacked(data["columns"])["distance"] * data["largest_distance"] / data["ticks"]
    worker = traces[1].frame["worker"].iloc[-1]
    np.testing.assert_allclose(
        distances[-1], np.linalg.norm(before.replicas[worker] - run.params), rtol=1e-4
    )


def unpacked(packed: dict) -> dict[str, np.ndarray]:
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["bytes"])), np.uint8)
    values = np.ascontiguousarray(planes.reshape(4, -1).T).view("<i4")[:, 0]
    ends = np.cumsum([*packed["lengths"].values()])
    return dict(zip(packed["lengths"], np.split(values, ends[:-1]), strict=True))


def test_a_page_without_figures_is_redrawn_with_the_timeline_of_the_first_recording(tmp_path):
    recording = tmp_path / "recordings" / "gem-seed0"
    recording.mkdir(parents=True)
    trace = simulate(Cluster(2, Gamma(1, 0.2)), commits=6, seed=0)
    trace.save(recording / "trace.parquet")
    (tmp_path / "config.json").write_text('{"study": "claims", "problem": "digits"}')
    assert main(["figures", str(tmp_path)]) == 0
    data = data_of(tmp_path / "report.html")
    (shown,) = data["timelines"]
    assert (shown["title"], shown["commits"], data["figures"]) == ("gem-seed0", 6, [])


def test_a_timeline_of_rollouts_has_a_lane_for_each_slot():
    rollouts = Rollouts(slots=4, length="exponential(1)", batch=4, group=2)
    trace = simulate(Cluster(1, 0.3, rollouts=rollouts), commits=20)
    data = timeline("rollouts", trace)
    columns = unpacked(data["columns"])
    trained = trace.samples[trace.samples["outcome"] == "trained"]
    assert data["lanes"] == 4 and data["commits"] == len(trained)
    assert sorted(columns["staleness"]) == sorted(trained["staleness"])
    tick = data["end"] / data["ticks"]
    begun = (np.cumsum(columns["time"]) - columns["age"]) * tick
    np.testing.assert_allclose(sorted(begun), sorted(trained["start_time"]), atol=2 * tick)


@browser
def test_a_hover_on_a_commit_shows_its_read(animated, tmp_path):
    data = data_of(animated / "report.html")["timelines"][-1]
    columns = unpacked(data["columns"])
    row = len(columns["worker"]) // 2
    version = np.cumsum(columns["version"])
    read = version[row] - columns["read"][row]
    script = f"""
      const ready = asyncsimTimeline, [lanes] = ready.plots;
      ready.view(0, 1e9);
      const y = ({columns["worker"][row]} + 0.5) / {data["lanes"]} * lanes.over.clientHeight;
      lanes.setCursor({{ left: lanes.valToPos(ready.commits.time[{row}], "x"), top: y }});
      result.text = document.getElementById("timeline-status").textContent;
    """
    result = in_a_browser(animated / "report.html", script, tmp_path)
    assert f"read version {read} at" in result["text"]
    assert f"staleness {columns['staleness'][row]}." in result["text"]


@browser
def test_a_timeline_opens_at_ten_commits_a_lane_and_follows_in_all_panels(animated, tmp_path):
    """On a touch screen two fingers zoom, and a tap shows the nearest commit."""
    script = """
      const ready = asyncsimTimeline, [lanes] = ready.plots, { over } = lanes;
      const frame = () => new Promise((done) => setTimeout(done, 50));
      const shown = ready.commits.time.filter((time) => time <= lanes.scales.x.max).length;
      result.shown = shown / ready.commits.time.length;
      const touch = (type, id, x) => over.dispatchEvent(new PointerEvent(type,
        { pointerType: "touch", pointerId: id, clientX: over.getBoundingClientRect().left + x }));
      touch("pointerdown", 1, 100); touch("pointerdown", 2, 200);
      const under = [100, 200].map((x) => lanes.posToVal(x, "x"));
      touch("pointermove", 1, 50); await frame();
      touch("pointermove", 2, 300); await frame();
      result.pinched = [50, 300].map((x, i) => lanes.posToVal(x, "x") - under[i]);
      touch("pointerup", 1, 50); touch("pointerup", 2, 300);
      touch("pointerdown", 3, 120); touch("pointerup", 3, 120);
      lanes.setCursor({ left: 120, top: 5 }); over.click();
      result.tapped = document.getElementById("timeline-status").textContent;
      const steps = () => ready.plots.map((plot) => plot.data[1].length);
      const all = steps();
      ready.follow(3); await frame();
      result.fewer = steps().filter((count, i) => count < all[i]).length;
    """
    found = in_a_browser(animated / "report.html", script, tmp_path)
    assert found["fewer"] == 1  # at the server
    assert 0.2 < found["shown"] < 0.5 and found["tapped"].startswith("worker 0 at ")
    assert found["pinched"] == pytest.approx([0, 0], abs=1e-9)


@pytest.mark.full
def test_a_page_shows_a_run_with_crashes():
    options = "--workers=3 --steps=60 --seeds=1 --problem=quadratic --methods downpour "
    options += "--policy asynchronous --deaths 100"
    assert study.main(["failures", *options.split()]) == 0
    ((title, _, trace),) = page.shown_runs(Path("results/failures"))
    assert title == "downpour, seed 0" and len(trace.absences)
