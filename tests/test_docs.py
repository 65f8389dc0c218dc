"""The documentation: it builds, links work, commands run, everything is explained."""

import dataclasses
import functools
import html
import json
import logging
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT
from table import SCRIPTS

from cleanrl_utils.analysis import palette
from cleanrl_utils.errors import BadInput
from cleanrl_utils.pages import code, diffs, films, notes, overview, readme, results, scripts, tags
from cleanrl_utils.pages.site import Site, shown_groups
from cleanrl_utils.running.evaluation import import_script
from cleanrl_utils.running.zoo import read_zoo

CHROMIUM = Path("/usr/bin/chromium")
README = ROOT / "README.md"
EXAMPLE = ROOT / "docs" / "examples" / "ppo_masked.py"
TABLE = {script.name: script for script in SCRIPTS}
one_build = pytest.mark.xdist_group("docs")  # for all tests of the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages() -> Site:
    return Site()


class Page:
    """Links, anchors and table rows of a page."""

    def __init__(self, path: Path):
        text = path.read_text()
        self.links = [html.unescape(x) for x in re.findall(r'\s(?:href|src)="([^"]*)"', text)]
        self.ids = {"", *re.findall(r'\sid="([^"]*)"', text)}
        rows = re.findall(r"<tr>(.*?)</tr>", text, re.S)
        self.rows = [
            [plain(x) for x in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row, re.S)] for row in rows
        ]


def plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", text)).strip()


parse = functools.cache(Page)  # once for all tests


# -- the build -----------------------------------------------------------------------------------


@one_build
def test_every_internal_link_leads_somewhere(site: Path) -> None:
    found = {path: parse(path) for path in site.rglob("*.html")}
    assert len(found) > 40
    broken = []
    for path, page in found.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            url, anchor = urldefrag(unquote(link))
            target = (path.parent / url).resolve() if url else path
            target = target / "index.html" if target.is_dir() else target
            known = found[target].ids if target in found else {""}
            if not target.exists() or (anchor and target in found and anchor not in known):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_a_link_to_code_that_is_not_there_ends_a_strict_build(pages, caplog) -> None:
    assert notes.find_line("ppo.py", "def gae(")[1] > 100
    for file, text in [("ppo.py", "no such code"), ("ppo.py", "args."), ("absent.py", "x")]:
        with pytest.raises(LookupError):
            notes.find_line(file, text)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="x.md"))
    with caplog.at_level(logging.WARNING):
        assert pages.resolve('[this](src:ppo.py#"no such code")', page, None) == "this"
        pages.fill("{{ nonsense }}", page)
    assert len(caplog.records) == 2 and all(x.name.startswith("mkdocs") for x in caplog.records)


@one_build
def test_notes_follow_the_lines_they_explain(site: Path) -> None:
    text = (site / "source" / "ppo.html").read_text()
    line = r'<div class="line noted" id="L(\d+)">.*?</div><div class="note" data-line="(\d+)">'
    found = re.findall(line, text)
    assert len(found) >= 10 and all(a == b for a, b in found)
    assert "https://github.com/openai/baselines/" in text  # a note keeps the link to its source


def test_a_paragraph_about_lines_close_to_each_other_is_one_note() -> None:
    text = """# Title (T)

1. **[One](src:ppo.py#"(ratio - 1 - logratio) * weights")** and
   [two](src:ppo.py#"(((ratio - 1).abs()"), and [far](src:ppo.py#"def gae("), see
   [paper](https://arxiv.org/abs/1).
"""
    found: notes.Notes = {}
    notes.add_notes(found, text, "x.md")
    codes = ("(ratio - 1 - logratio) *", "def gae(")
    lines = [notes.find_line("ppo.py", code)[1] for code in codes]
    assert sorted(found["ppo.py"]) == sorted(lines)
    (note,) = found["ppo.py"][lines[0]]
    assert note.text.endswith('see <a href="https://arxiv.org/abs/1">paper</a>.')


@one_build
def test_search_finds_pages_and_no_code(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert not [x["location"] for x in index if x["location"].startswith("source/")]
    text = " ".join(x["text"] for x in index)
    assert "clipped surrogate objective" in text and "SyncVectorEnv([" not in text


def test_words_that_changed_stand_out() -> None:
    left, right = diffs.changed_words(["x = f(a, 1)", "same"], ["x = f(b, 1)", "same"])
    assert left == {0: {6}} and right == {0: {6}}
    (line,) = code.highlight("x = f(b, 1)\n", right)
    assert plain(line) == "x = f(b, 1)" and re.findall("<mark>(.*?)</mark>", line) == [
        '<span class="n">b</span>'
    ]
    source = (ROOT / "cleanrl" / "ppo.py").read_text()
    shown = [html.unescape(re.sub("<[^>]*>", "", line)) for line in code.highlight(source)]
    assert shown == source.splitlines()  # nothing is lost on the way


@one_build
def test_pages_are_small(site: Path) -> None:
    for path in set(site.rglob("*.html")) - {site / "404.html"}:
        local = [link for link in parse(path).links if re.search(r"\.(js|css|png|gif)$", link)]
        files = {(path.parent / link).resolve() for link in local} | {path}
        assert sum(file.stat().st_size for file in files) < 3e6, path


# -- what comes from the code ----------------------------------------------------------------------


def own_page(site: Path, script: scripts.Script) -> Page:
    return parse((site / script.page).with_suffix(".html"))


@one_build
@pytest.mark.parametrize("name", scripts.read_scripts())
def test_every_flag_and_every_tag_is_explained(name: str, site: Path, pages) -> None:
    script = pages.scripts[name]
    for package in TABLE[name].needs if name in TABLE else []:
        pytest.importorskip(package)
    page, shared = own_page(site, script), parse(site / "get-started" / "basic-usage.html")
    explained = {row[0].split(",")[0]: row[-1] for row in page.rows + shared.rows if row}
    fields = [field.name for field in dataclasses.fields(import_script(name).Args)]
    own = {flag.field for flag in script.flags}
    assert len(fields) > 15 and own < set(fields)
    for field in fields:
        flag = "--" + field.replace("_", "-")
        assert len(explained.get(flag, "")) > 5, f"{flag} of {name}.py"
        assert flag in {row[0].split(",")[0] for row in page.rows if row} or field not in own
    for tag in script.tags:
        assert len(explained.get(tag, "")) > 10, f"{tag} of {name}.py"
    if name in TABLE:  # what the tests saw it log, the parser of the source must know
        assert set(TABLE[name].tags) <= set(script.tags)


def test_tags_are_found_however_they_are_written() -> None:
    source = """
NAMES = ["a", "b"]
TAGS = [f"losses/{name}" for name in NAMES]
TAGS += ["charts/c"]
x = Means("losses/d", *(f"losses/{name}_two" for name in NAMES))
metrics = {"losses/e": f(x)}
"""
    found = set(scripts.Script("x", source).tags) - set(tags.ALWAYS)
    wanted = {f"losses/{x}" for x in ("a", "b", "d", "a_two", "b_two", "e")} | {"charts/c"}
    assert found == wanted


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("run.log_episode(x, y, step, average=20)", {"charts/avg_episodic_return"}),
        ("run.log_rollout(x, y, step, average=args.window)", {"charts/avg_episodic_return"}),
        ("run.log_episode(x, y, step, average=0)", set()),
        ("other(x, average=20)  # average=20", set()),
        ('run.log_episodes(infos, step, "teacher/")', {"charts/teacher/episodic_return"}),
        (
            'length, suffix = y, f"-player{i}"\nrun.log_episode(x, length, step, suffix)',
            {"charts/episodic_return-player0", "charts/episodic_return-player1"},
        ),
    ],
)
def test_tags_of_episodes_come_from_the_calls_that_log_them(code: str, wanted: set) -> None:
    found = set(scripts.Script("x", code).tags) - set(tags.ALWAYS)
    lengths = {tag.replace("_return", "_length") for tag in wanted}
    assert found == wanted | lengths


def test_results_appear_without_an_edit(pages, tmp_path: Path) -> None:
    """Every result of benchmark/results is on a page, with its number of seeds."""
    for group in pages.groups:
        if group.script not in pages.scripts:
            continue  # a copy of a script, made to compare with
        text = pages.results_of(pages.scripts[group.script])
        assert (
            f"| `{results.short_id(group.env_id)}`" in text
            and group.score() in text
            and "data-part" in text
        )
        assert all(fact["run"] in results.read_curves(group.name) for fact in group.runs)


def test_the_overview_says_what_a_speed_was_measured_on() -> None:
    fast = {"steps": 9000, "seconds": 1.0, "hardware": "NVIDIA H200 (16 cores)"}
    slow = {"steps": 500, "seconds": 1.0, "hardware": "cpu, 1 torch thread (AMD EPYC, 2 cores)"}
    on_cpu = results.Group("ppo_small", "ppo", "A-v0", 500, [slow])
    on_gpu = results.Group("ppo", "ppo", "A-v0", 9000, [fast])
    assert overview.speed_of([on_cpu]) == "500 CPU"
    assert overview.speed_of([on_cpu, on_gpu]) == "9,000 GPU"
    assert overview.speed_of([]) == ""


def test_the_home_page_has_no_tuned_and_no_small_runs(pages) -> None:
    shown = shown_groups(pages.groups)
    assert len(shown) > 10 and not [x for x in shown if x.name.endswith(("_tuned", "_small"))]


def test_one_seed_has_no_deviation() -> None:
    run = {"seed": 1, "final_return": 10.0, "best_return": 11.0, "seconds": 60.0, "steps": 100}
    group = results.Group("ppo", "ppo", "CartPole-v1", 100, [run])
    assert group.score() == "10.00"
    group.runs.append(run | {"final_return": 14.0})  # the same seed again
    assert group.score() == "12.00" and group.seeds == 1
    group.runs[1]["seed"] = 2
    assert group.score() == "12.00\u00a0±\u00a02.83"  # of a sample: divided by n - 1
    assert all(("±" in x.score()) == (x.seeds > 1) for x in results.read_groups())


def test_runs_whose_environments_restarted_at_checkpoints_are_marked() -> None:
    run = {"command": "", "commit": "abc", "dirty": True, "hardware": "cpu", "versions": {}}
    group = results.Group("dqn", "dqn", "CartPole-v1", 100, [run])
    text = results.provenance([group])
    assert "| abc*† |" in text and "† in the code of that time" in text
    group.runs[0]["settings"] = {}
    assert "| abc* |" in results.provenance([group]) and "†" not in results.provenance([group])


def test_seeds_without_a_finished_episode_are_counted() -> None:
    runs = [{"seed": 1, "final_return": 10.0}, {"seed": 2, "final_return": float("nan")}]
    group = results.Group("ppo", "ppo", "MountainCar-v0", 100, runs)
    assert group.score() == "10.00 (1 of 2 seeds finished no episode)"
    assert results.Group("ppo", "ppo", "MountainCar-v0", 100, runs[1:]).score() == "–"


def test_greedy_returns_are_shown_with_their_range() -> None:
    one = {"seed": 1, "greedy_returns": [90.0, 110.0]}
    group = results.Group("ppo", "ppo", "CartPole-v1", 100, [one, {"seed": 2}])
    assert group.greedy() == "100.00 (90 to 110)"
    none = results.Group("ppo", "ppo", "CartPole-v1", 100, [{"seed": 2}])
    assert none.greedy() == ""
    assert "*Greedy*" in results.explain([group, none], {})
    assert "*Greedy*" not in results.explain([none], {})
    known = [x for x in results.read_groups() if x.script == "ppo"]
    has_greedy = any(x.greedy() for x in known)
    assert ("| greedy |" in results.results_table("ppo", known, {})[0]) == has_greedy


def test_minutes_of_seeds_that_trained_in_one_program_are_explained(pages) -> None:
    for name in ("ppo", "pqn", "ppo_jax", "pqn_jax"):
        known = [x for x in pages.groups if x.script == name]
        assert ("`--num-seeds`" in results.explain(known, {})) == name.endswith("_jax")


@pytest.mark.parametrize("name", ["ppo", "crossq_continuous_action"])
def test_only_scripts_of_the_original_have_its_column(name: str, pages) -> None:
    known = [x for x in pages.groups if x.script == name]
    table, _ = results.results_table(name, known, pages.published)
    text = results.explain(known, pages.published)
    assert ("| the original's |" in table) == ("*The original's*" in text) == (name == "ppo")
    assert len({line.count("|") for line in table.splitlines()[2:]}) == 1


@pytest.mark.parametrize("count", [1, 8, 20, 45])
def test_colours_do_not_repeat(count: int) -> None:
    found = palette.colors(count)
    assert len(set(found)) == count and all(re.fullmatch("#[0-9a-f]{6}", x) for x in found)


def test_every_line_of_a_chart_has_its_colour(pages) -> None:
    text = results.charts_html(pages.groups, {})
    data = json.loads(text[text.index(">{") + 1 : text.index("</script>")])
    names = {line["name"] for chart in data["charts"] for line in chart["lines"]}
    assert len(names) > 8 and len(set(data["colors"])) == len(names)


def test_a_page_without_results_does_not_deny_published_ones(pages, monkeypatch) -> None:
    monkeypatch.setattr(pages, "groups", [])
    text = pages.results_of(pages.scripts["ppo_pettingzoo_ma_atari"])
    assert "No run of ours" in text and "published" not in text


def test_commands_are_broken_between_words_only(pages) -> None:
    (group,) = [x for x in pages.groups if (x.name, x.env_id) == ("ppo", "CartPole-v1")]
    text = results.provenance([group])
    assert "<span>--env-id</span> <span>CartPole-v1</span>" in text and "--seed" not in text
    files = "`sh benchmark/ppo.sh`, `sh benchmark/tuned.sh`"
    assert results.commands_of("ppo") == f" Commands: {files}."


def test_readme_has_the_table_and_the_pictures() -> None:
    text = README.read_text()
    assert readme.fill_readme(text) == text, "run python -m cleanrl_utils.docs"
    for name in scripts.read_scripts():
        assert f"cleanrl/{name}.py" in text
    pictures = re.findall(r"!\[.*?\]\((docs/assets/[^)]+)\)", text)
    assert len(pictures) == 2  # curves and agents
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < (
            1_500_000 if picture.endswith(".gif") else 500_000
        )
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (ROOT / link).exists(), link


def test_pictures_are_made_by_commands(train: Callable, tmp_path: Path) -> None:
    readme.draw_curves(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 20_000
    done = train("ppo", "--total-timesteps 512 --num-steps 32 --save-model --eval-episodes 1")
    folder, strip = tmp_path / "films", tmp_path / "strip.gif"
    path, *_ = films.make_films([str(done.folder)] * 2, folder, strip)
    assert path.name == "ppo__CartPole-v1.webp" and path.read_bytes()[8:12] == b"WEBP"
    assert strip.read_bytes()[:3] == b"GIF"
    assert 1000 < path.stat().st_size < 500_000 and strip.stat().st_size < 1_500_000
    (film,) = films.read_films(folder)
    assert (film.script, film.env_id, film.steps) == ("ppo", "CartPole-v1", 512)
    assert film.episodic_return >= 1 and film.command.startswith("python cleanrl/ppo.py")
    assert films.read_strip(strip) == [film, film]
    path.unlink()
    assert films.read_films(folder) == []  # facts without their film
    with pytest.raises(BadInput) as bad:
        films.make_films([str(tmp_path)], folder, strip)
    assert bad.value.message == f"--gif {tmp_path}: has no model; train with --save-model"
    with pytest.raises(BadInput) as bad:
        films.make_films(["nothing"], folder, strip)
    assert bad.value.message == "--gif nothing: no such folder or model of the zoo"


def test_every_model_of_the_zoo_has_a_film(tmp_path: Path) -> None:
    kept = {model.name: model for model in read_zoo()}
    filmed = {Path(film.file).stem: film for film in films.read_films()}
    assert kept.keys() <= filmed.keys()
    for name, model in kept.items():
        assert filmed[name].command == model.command, name
    name = "ppo__CartPole-v1"
    films.make_films([name], tmp_path)
    assert films.read_films(tmp_path)[0].command == kept[name].command


@one_build
def test_films_stand_among_the_results_of_their_script(site: Path) -> None:
    shown = films.read_films()
    assert shown and [film.env_id for film in films.read_strip()]
    pages = [page.read_text() for page in (site / "rl-algorithms").glob("*.html")]
    for film in shown:
        figure = re.compile(rf'<figure class="film"[^>]*>.*?{film.file}.*?</figure>')
        figures = [figure.findall(page) for page in pages]
        assert max(map(len, figures)) == 1, film.file  # once on a page
        for (text,) in filter(None, figures):
            assert f"{film.episodic_return:,.0f}" in text and film.env_id in text
    for kind in ("mp4", "webm"):
        moved = dataclasses.replace(shown[0], file=f"x.{kind}")
        assert "<video" in films.film_html("x", moved)


def test_films_are_of_what_the_page_says(train: Callable) -> None:
    """get-started/experiment-tracking.md: a resumed run starts a new part, and the evaluation is
    filmed only where the model is saved."""
    flags = "--total-timesteps 512 --num-steps 32 --capture-video --checkpoints 2"
    videos = train("ppo", f"{flags} --eval-episodes 1").folder / "videos"
    assert {path.name.split("-episode-")[0] for path in videos.iterdir()} == {"part0"}
    assert (videos / "part0-episode-0.mp4").exists()
    train("ppo", f"--resume {videos.parent} --total-timesteps 1024")
    assert {path.name.split("-episode-")[0] for path in videos.iterdir()} == {"part0", "part1"}
    done = train("ppo", f"{flags} --eval-episodes 1 --save-model --seed 2")
    assert (done.folder / "videos" / "evaluation" / "part0-episode-0.mp4").exists()


def test_files_for_github_are_readable_and_name_what_there_is() -> None:
    yaml = pytest.importorskip("yaml")
    paths = [*(ROOT / ".github").rglob("*.y*ml"), ROOT / "CITATION.cff"]
    assert len(paths) >= 6
    for path in paths:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
    text = "".join(path.read_text() for path in paths) + (ROOT / "Makefile").read_text()
    for file in re.findall(r"requirements/[\w-]+\.txt", text):
        assert (ROOT / file).exists(), file
    for target in re.findall(r"run: make (\w+)", text):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_badges_say_what_is_so() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    badges = re.findall(r"!\[(.+?)\]\(https://img\.shields\.io/badge/(\S+?)\)", README.read_text())
    facts = {
        "licence": about["project"]["license"],
        "Python": "≥ " + about["project"]["requires-python"].removeprefix(">="),
        "code style": "ruff" if "ruff" in about["tool"] else "",
        "tests": "make test",
        "docs": "make docs",
    }
    shown = [unquote(badge).rpartition("-")[0].partition("-") for _, badge in badges]
    assert {what: value for what, _, value in shown} == facts


def test_the_dev_container_names_what_there_is() -> None:
    about = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    base = re.search(r"^FROM python:([\d.]+)-slim-(\w+)", (ROOT / "Dockerfile").read_text(), re.M)
    assert base and about["image"] == f"python:{base[1]}-{base[2]}"
    makefile = (ROOT / "Makefile").read_text()
    (target,) = re.findall(r"^make (\w+)$", about["postCreateCommand"])
    assert f"\n{target}:" in makefile and "\nVENV ?=" in makefile
    venv = about["containerEnv"]["VENV"]
    assert about["remoteEnv"]["PATH"].startswith(f"{venv}/bin:")
    settings = about["customizations"]["vscode"]["settings"]
    assert settings["python.defaultInterpreterPath"] == f"{venv}/bin/python"


# -- commands ----------------------------------------------------------------------------------

RUNNABLE = re.compile(r"^<!-- runnable -->\n+```bash\n(.*?)\n```", re.S | re.M)
WRITTEN = [README, *sorted((ROOT / "docs").rglob("*.md"))]
WITH_COMMANDS = [path for path in WRITTEN if RUNNABLE.search(path.read_text())]
SMALL = "--total-timesteps 512 --num-envs 2 --num-steps 32"


def commands(block: str) -> list[list[str]]:
    """The commands of a block; quoted text may go over several lines."""
    words = shlex.split(block.replace("\\\n", " ").replace("\n", " \n "), comments=False)
    lines = [line for line in re.split(r"\n(?=python |#)", block) if not line.startswith("#")]
    assert words and all(line.startswith("python ") for line in lines), block
    return [shlex.split(line.replace("\\\n", " ")) for line in lines]


@pytest.mark.parametrize(
    "path", WITH_COMMANDS, ids=[str(path.relative_to(ROOT)) for path in WITH_COMMANDS]
)
def test_commands_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of a page in order, in this process, with fewer steps."""
    for name in ("cleanrl", "docs", "benchmark"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for block in RUNNABLE.findall(path.read_text()):
        for _, what, *rest in commands(block):
            module = rest.pop(0) if what == "-m" else ""
            if what == "-c":
                exec(rest[0], {"__name__": "__main__"})
                continue
            if what.startswith("cleanrl/"):
                row = TABLE[Path(what).stem]
                for package in row.needs:
                    pytest.importorskip(package)
                rest += [*row.quick.split(), "--eval-episodes", "1"]
            elif what.startswith("docs/"):
                small = TABLE["dqn"].quick if "dqn" in what else SMALL
                rest += [*small.split(), "--eval-episodes", "1"]
            monkeypatch.setattr(sys, "argv", [what, *rest])
            try:
                run = runpy.run_module if module else runpy.run_path
                run(module or what, run_name="__main__", **({"alter_sys": True} if module else {}))
            except SystemExit as stop:
                assert stop.code in (0, None), (what, rest, stop)


def test_every_command_of_a_script_has_flags_that_exist() -> None:
    """The scripts and flags of all commands exist, also of those that are not run."""
    checked, every = 0, scripts.read_scripts()
    shared = {x.field for flags in scripts.shared_flags().values() for x in flags} | {"help"}
    for path in WRITTEN:
        for block in re.findall(r"^ *```bash\n(.*?)```", path.read_text(), re.S | re.M):
            text = block.replace("\\\n", " ")
            for name, rest in re.findall(r"cleanrl/(\w+)\.py([^\n|\"]*)", text):
                assert (ROOT / "cleanrl" / f"{name}.py").exists(), (path.name, name)
                known = {x.field for x in every[name].flags} | shared
                for flag in re.findall(r"--([\w-]+)", rest):
                    field = flag.replace("-", "_")
                    assert {field, field.removeprefix("no_")} & known, (path.name, name, flag)
                    checked += 1
    assert checked > 50


@pytest.mark.skipif(os.name != "posix", reason="needs sh")
def test_every_script_has_a_command_among_the_benchmarks(tmp_path: Path) -> None:
    """Run benchmark/*.sh with a fake Python that records its commands."""
    from cleanrl_utils.benchmark import BenchmarkArgs  # not at the top: pages run it as a command

    python, said = tmp_path / "bin" / "python", tmp_path / "said"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done >> {said}\n')
    python.chmod(0o755)
    env = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    for path in sorted((ROOT / "benchmark").glob("*.sh")):
        subprocess.run(["sh", str(path)], cwd=tmp_path, env=env, check=True, capture_output=True)
    every, started = scripts.read_scripts(), set()
    shared = {x.field for flags in scripts.shared_flags().values() for x in flags}
    known = {field.name for field in dataclasses.fields(BenchmarkArgs)}
    for call in said.read_text().split("-m\0cleanrl_utils.")[1:]:
        tool, *words = call.split("\0")
        if tool != "benchmark":
            continue
        flags = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
        assert set(flags) <= known, words
        command = words[words.index("--command") + 1]
        ((name, rest),) = re.findall(r"(?:python|torchrun .*) cleanrl/(\w+)\.py(.*)", command)
        for flag in re.findall(r"--([\w-]+)", rest):
            field = flag.replace("-", "_")
            fields = {x.field for x in every[name].flags} | shared
            assert {field, field.removeprefix("no_")} & fields, (name, flag)
        started.add(name)
    assert started == set(every)


# -- the worked example ------------------------------------------------------------------------


class Masked(gym.Env):
    """Half of the actions are invalid, each time others; the last valid one is right. The world
    ends at an invalid action."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(6)

    def observe(self) -> tuple[np.ndarray, dict]:
        self.mask = np.zeros(6, np.int8)
        self.mask[self.np_random.choice(6, 3, replace=False)] = 1
        return np.ones(1, np.float32), {"action_mask": self.mask}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.t = 0
        return self.observe()

    def step(self, action: int) -> tuple:
        assert self.mask[action] == 1, "an invalid action"
        reward = float(action == np.flatnonzero(self.mask)[-1])
        self.t += 1
        obs, info = self.observe()
        return obs, reward, self.t == 4, False, info


gym.register("Masked-v0", entry_point=Masked)


def test_the_example_never_acts_invalidly_and_learns(train: Callable, monkeypatch) -> None:
    name = "../docs/examples/ppo_masked"  # beside the scripts
    flags = "--env-id Masked-v0 --gamma 0.5 --total-timesteps 8192 --num-steps 32 --ent-coef 0"
    done = train(name, f"{flags} --learning-rate 0.01 --save-model --eval-episodes 5")
    returns = [value for _, tag, value in done.rows() if tag == "charts/episodic_return"]
    assert np.mean(returns[:20]) < 3 and np.mean(returns[-50:]) > 3.8  # of 4
    assert [v for _, tag, v in done.rows() if tag == "eval/episodic_return"] == [4.0] * 5


def test_the_example_is_small() -> None:
    ours, theirs = EXAMPLE.read_text(), (ROOT / "cleanrl" / "ppo.py").read_text()
    code = [re.sub(r"^\s*#.*\n", "", text, flags=re.M) for text in (theirs, ours)]
    gone, new = diffs.diff_size(*code)
    assert gone <= 25 and new <= 45, (gone, new)


# -- in a browser ------------------------------------------------------------------------------


@one_build
@pytest.mark.parametrize("width", [1280, 390])
def test_the_site_in_a_browser(site: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    said: list[str] = []
    requests: list[str] = []
    every = scripts.read_scripts()
    with playwright.sync_playwright() as p:
        options = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = p.chromium.launch(executable_path=str(CHROMIUM), args=options)
        context = browser.new_context(offline=True, viewport={"width": width, "height": 850})
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"{page.url}: {error}"))
        page.on("request", lambda request: requests.append(request.url))

        def visit(name: str) -> None:
            began = time.perf_counter()
            page.goto(f"file://{site}/{name}.html", wait_until="load")
            page.add_style_tag(content="*{scroll-behavior:auto!important}")
            assert time.perf_counter() - began < 2 * SLOW, name
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name

        visit("index")
        assert page.locator("img.strip").evaluate("image => image.naturalWidth") > 100
        if width < 1000:
            page.locator("label[for=__search]:visible").first.click()
        page.locator(".md-search__input").click()
        page.locator(".md-search__input").type("truncation")
        page.locator(".md-search-result__item").first.wait_for(timeout=5000)

        assert page.locator("path.curve").first.is_visible()
        assert page.locator(".cards li").count() == len({x.page for x in every.values()})

        visit("rl-algorithms/overview")
        assert page.locator("td", has_text="ppo_atari_lstm.py").first.is_visible()
        heights = page.locator("td:first-child code").evaluate_all(
            "all => all.map(x => x.offsetHeight)"
        )
        assert max(heights) < 1.5 * min(heights)  # no name is broken
        table = page.locator(".md-typeset__table table").first
        overflow = table.evaluate(
            "x => x.scrollWidth - x.closest('.md-typeset__scrollwrap').clientWidth"
        )
        assert overflow <= 0 or width < 1000

        visit("rl-algorithms/ppo")
        place = page.locator(".curves").first
        place.scroll_into_view_if_needed()
        curve = place.locator("path.curve").first
        before = curve.get_attribute("d")
        assert curve.is_visible() and place.locator(".mark").count() > 0
        place.locator("select").first.select_option("1")  # minutes
        assert place.locator("path.curve").first.get_attribute("d") != before
        assert "minutes" in (place.locator(".chart").first.text_content() or "")
        count = place.locator("path.curve").count()
        place.locator("select").nth(1).select_option("1")  # each seed
        assert place.locator("path.curve").count() > count
        place.locator("svg").first.hover()
        assert "ppo" in place.locator(".tip").first.inner_text()

        visit("source/ppo")
        note = page.locator(".note").first
        assert note.is_visible() and page.locator("#L100").count() == 1
        line = page.locator(f"#L{note.get_attribute('data-line')}")
        a, b = note.bounding_box(), line.bounding_box()
        assert a and b and (a["x"] > b["x"] + b["width"] - 1) == (width > 1000)  # beside, or below
        assert (abs(a["y"] - b["y"]) < 2) == (width > 1000)
        boxes = [x.bounding_box() for x in page.locator(".note").all()]
        ends = [box["y"] + box["height"] for box in boxes if box]
        assert all(end <= box["y"] for end, box in zip(ends, boxes[1:], strict=False) if box)
        if width > 1000:
            page.locator(".md-sidebar--secondary a", has_text="gae").click()
            assert page.url.endswith(f"#L{notes.find_line('ppo.py', 'def gae(')[1]}")

        for name in ("ppo_atari", "ppo_continuous_action", "ppo_jax"):
            visit(f"source/{name}-diff")
            assert page.locator(".line.gone").first.is_visible()
            assert page.locator(".line.new").first.is_visible()
            left, right = page.locator(".replace").first.locator(".side").all()
            a, b = left.bounding_box(), right.bounding_box()
            assert a and b and (a["y"] == b["y"]) == (width > 1000)  # beside, or below
            folded = page.locator(".diff details").first
            folded.locator("summary").click()
            assert folded.locator(".line").first.is_visible()
        browser.close()
    assert said == [] and all(url.startswith(("file:", "data:")) for url in requests)


SLOW = 4 if os.environ.get("PYTEST_XDIST_WORKER") else 2  # the other core is at work, too
