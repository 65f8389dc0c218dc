"""Tables and charts of benchmark/results, with the published results of the original."""

import csv
import html
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleanrl_utils.analysis.committed import COMMITTED
from cleanrl_utils.analysis.palette import colors
from cleanrl_utils.pages.scripts import ROOT

PUBLISHED = ROOT / "benchmark" / "published.csv"
LONG = 45  # characters of a word of a command that may break
MANY = 12  # environments without our results; longer lists are collapsed
Published = dict[tuple[str, str], list[dict[str, str]]]  # figures by script and environment
Curve = list[list[float]]  # steps, minutes, returns

EXPLAIN = """*Ours* is the mean over seeds of each run's mean return over its last 100 training
episodes (all of them if it has fewer), ± the standard deviation over seeds (none for one seed).
*Best* takes each run's best 100 consecutive episodes instead.{greedy} *Minutes* is the median time
of a run, also where the runs of a row used different hardware (listed below the
charts).{together}{original}"""
EXPLAIN_TOGETHER = """ Where several seeds trained in one program (`--num-seeds`), it is the time of
the program for all of them."""
EXPLAIN_ORIGINAL = """ *The original's* are the published returns of the original CleanRL, in the
charts as dashed lines."""
EXPLAIN_GREEDY = """ *Greedy* is the mean return of the greedy policy after training, with its
worst and best episode, where the run recorded it."""
RESTARTED = """† in the code of that time, all environments restarted at each checkpoint, at most
ten times per run, and the episodes in progress were lost; today only EnvPool's games restart"""
NO_RUN = "No run of ours is in `benchmark/results` yet."
EXPLAIN_PUBLISHED = f"{NO_RUN} The figures are those of the original CleanRL."


def read_published() -> Published:
    """The published results of the original."""
    found: Published = {}
    with open(PUBLISHED) as file:
        for row in csv.DictReader(file):
            found.setdefault((row["script"], row["env_id"]), []).append(row)
    return found


@dataclass
class Group:
    """Runs of one experiment on one environment, all of the same length."""

    name: str
    script: str
    env_id: str
    steps: int
    runs: list[dict[str, Any]]

    def column(self, key: str) -> list[Any]:
        return [run[key] for run in self.runs if run[key] == run[key]]  # not NaN

    @property
    def seeds(self) -> int:
        return len({run["seed"] for run in self.runs})

    @property
    def on_cpu(self) -> bool:
        return all(run["hardware"].startswith("cpu") for run in self.runs)

    def score(self) -> str:
        """Mean and, with two seeds or more, sample standard deviation of the final returns, and
        how many seeds finished no episode."""
        final = self.column("final_return")
        if not final:
            return "–"
        several = self.seeds > 1 and len(final) > 1
        text = figure(statistics.fmean(final), statistics.stdev(final) if several else None)
        if len(final) < len(self.runs):
            text += f" ({len(self.runs) - len(final)} of {self.seeds} seeds finished no episode)"
        return text

    def best(self) -> str:
        best = self.column("best_return")
        return f"{statistics.fmean(best):,.2f}" if best else "–"

    def greedy(self) -> str:
        """Mean return of the greedy policies after training, lowest and highest episode."""
        returns = [value for run in self.runs for value in run.get("greedy_returns", [])]
        if not returns:
            return ""
        return f"{statistics.fmean(returns):,.2f} ({min(returns):,.0f} to {max(returns):,.0f})"

    def minutes(self) -> str:
        """The median time of a run: one that shared its machine may have taken far longer."""
        return f"{statistics.median(self.column('seconds')) / 60:,.1f}"

    def speed(self) -> float:
        return statistics.median(run["steps"] / max(run["seconds"], 1e-9) for run in self.runs)


def read_groups(folder: Path = COMMITTED) -> list[Group]:
    found: dict[tuple, Group] = {}
    for path in sorted(folder.glob("*.json")):
        for fact in json.loads(path.read_text()):
            if "script" not in fact:
                continue
            key = fact["script"], fact["exp_name"], fact["env_id"], fact["steps"]
            group = found.setdefault(key, Group(key[1], key[0], key[2], key[3], []))
            group.runs.append(fact)
    return list(found.values())


def read_curves(exp_name: str, folder: Path = COMMITTED) -> dict[str, Curve]:
    """The curve of each run of an experiment."""
    found: dict[str, Curve] = {}
    path = folder / f"{exp_name}.csv"
    if not path.exists():
        return found
    with open(path) as file:
        for row in csv.DictReader(file):
            curve = found.setdefault(row["run"], [[], [], []])
            minutes = float(row["seconds"]) / 60
            values = float(row["step"]), minutes, float(row["episodic_return"])
            for column, value in zip(curve, values, strict=True):
                column.append(float(f"{value:.5g}"))
    return found


def curves_of(group: Group) -> list[Curve]:
    known = read_curves(group.name)
    return [known[run["run"]] for run in group.runs if run["run"] in known]


# -- figures ---------------------------------------------------------------------------------


def figure(mean: float, std: float | None) -> str:
    """Mean ± standard deviation with non-breaking spaces."""
    return f"{mean:,.2f}" + (f"\u00a0±\u00a0{std:,.2f}" if std is not None else "")


def short_id(env_id: str) -> str:
    """The id of an environment without the module that registers it, which makes tables wide."""
    return env_id.split(":")[-1]


def cite(rows: list[dict[str, str]], ours: int = 0) -> str:
    """The original's results with sources, and with their steps if they differ from ours."""
    figures = []
    for row in rows:
        text = figure(float(row["mean"]), float(row["std"]) if row["std"] else None)
        theirs = int(row["steps"])
        steps = "" if abs(theirs - ours) < 0.02 * theirs else f", {theirs:,} steps"
        figures.append(f"{text} ([{row['what']}]({row['source']}){steps})")
    return "; ".join(figures)


def shortfall(group: Group, rows: list[dict[str, str]]) -> str:
    """By how much our result is below the best of the original's, and at how many steps."""
    final = group.column("final_return")
    if not rows or not final:
        return ""
    best = max(rows, key=lambda row: float(row["mean"]))
    theirs = float(best["mean"])
    missing = theirs - statistics.fmean(final)
    if missing < 0.005:  # the tables have two digits
        return ""
    share = f" ({missing / abs(theirs):.0%})" if theirs else ""
    part = group.steps / int(best["steps"])
    steps = f", after {part:.0%} of the steps" if part < 0.98 else ""
    return f"; **ours is {missing:,.2f} lower**{share}{steps}"


# -- tables ----------------------------------------------------------------------------------


def published_of(script: str, published: Published) -> dict[str, list[dict[str, str]]]:
    """The published results of a script, by environment."""
    return {env_id: rows for (name, env_id), rows in published.items() if name == script}


def explain(groups: list[Group], published: Published) -> str:
    """What the columns of the table of one script's groups mean."""
    has_greedy = any(group.greedy() for group in groups)
    has_original = any(published_of(group.script, published) for group in groups)
    commands = [run.get("command", "") for group in groups for run in group.runs]
    together = any("--num-seeds" in command for command in commands)
    return EXPLAIN.format(
        together=EXPLAIN_TOGETHER if together else "",
        greedy=EXPLAIN_GREEDY if has_greedy else "",
        original=EXPLAIN_ORIGINAL if has_original else "",
    )


def results_table(script: str, groups: list[Group], published: Published) -> tuple[str, str]:
    """Our results of a script, and published results of other environments, collapsed if many."""
    theirs = published_of(script, published)
    has_greedy = any(group.greedy() for group in groups)
    columns = ["environment", "ours", "best", *(["greedy"] if has_greedy else [])]
    columns += ["seeds", "steps", "minutes", *(["the original's"] if theirs else [])]
    head = [f"| {' | '.join(columns)} |", "|-" * len(columns) + "|"]
    rows = []
    for group in groups:
        name = "" if group.name == script else f" ({name_html(group.name)})"
        cells = [f"`{short_id(group.env_id)}`{name}", group.score(), group.best()]
        cells += [group.greedy()] if has_greedy else []
        cells += [str(group.seeds), f"{group.steps:,}", group.minutes()]
        there = theirs.get(group.env_id, [])
        cells += [cite(there, group.steps) + shortfall(group, there)] if theirs else []
        rows.append(f"| {' | '.join(cells)} |")
    done = {group.env_id for group in groups}
    left = [
        f"| `{env_id}` | not run yet {'| ' * (len(columns) - 2)}{cite(rows)} |"
        for env_id, rows in theirs.items()
        if env_id not in done
    ]
    folded = ""
    if len(left) > MANY:
        title = f"The original's figures for {len(left)} environments that we have not run yet"
        folded = f'??? note "{title}"\n\n' + indent("\n".join([*head, *left]))
        left = []
    table = "\n".join([*head, *rows, *left]) if rows or left else ""
    return table, folded


def everything_table(groups: list[Group], pages: dict[str, str], published: Published) -> str:
    """A table with one row per group; `pages` has the page of each script."""
    rows = ["| environment | script | ours | seeds | steps | minutes | the original's |"]
    rows.append("|-|-|-|-|-|-|-|")
    for group in groups:
        page = pages.get(group.script, "overview.md")
        there = published.get((group.script, group.env_id), [])
        theirs = cite(there, group.steps) + shortfall(group, there)
        cells = [f"`{short_id(group.env_id)}`", f"[`{group.name}`]({page})", group.score()]
        cells += [str(group.seeds), f"{group.steps:,}", group.minutes(), theirs]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def commands_of(script: str) -> str:
    """A sentence that names the benchmark files of a script."""
    found = []
    for path in sorted((ROOT / "benchmark").glob("*.sh")):
        code = re.sub(r"^#.*", "", path.read_text(), flags=re.M)
        if re.search(rf"\b{script}\b(?![-*])", code):
            found.append(path.name)
    return f" Commands: {', '.join(f'`sh benchmark/{name}`' for name in found)}." if found else ""


def provenance(groups: list[Group]) -> str:
    """Commands, commits, hardware and versions of runs, collapsed."""
    lines = ["| environment | command, without its seed | commit | hardware | versions |"]
    lines.append("|-|-|-|-|-|")
    for group in groups:
        commands = {re.sub(r" --seed \d+", "", run["command"]) for run in group.runs}
        commits = {marked_commit(run) for run in group.runs}
        versions = {describe_versions(run["versions"]) for run in group.runs}
        cells = [
            f"`{short_id(group.env_id)}`",
            "<br>".join(command_html(command) for command in sorted(commands)),
            ", ".join(sorted(commits)),
            "; ".join(sorted(set(group.column("hardware")))),
            "; ".join(sorted(versions)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if any(run.get("dirty") for group in groups for run in group.runs):
        lines.append("\n\\* with changes that were not committed")
    if any(restarted(run) for group in groups for run in group.runs):
        lines.append(f"\n{RESTARTED}")
    if any(len(set(group.column("commit"))) > 1 for group in groups):
        several = "several commits: the seeds of this row ran at different ones, between which the"
        lines.append(f"\n{several} code may have changed")
    return '??? note "Commands, commits, hardware"\n\n' + indent("\n".join(lines))


def marked_commit(run: dict[str, Any]) -> str:
    """The commit of a run, with * if files were changed and † if its environments restarted."""
    return run["commit"] + "*" * bool(run.get("dirty")) + "†" * restarted(run)


def restarted(run: dict[str, Any]) -> bool:
    """Whether a run is of a commit before 2f76b44; results of those commits have no settings."""
    return "settings" not in run and "--checkpoints 0" not in run["command"]


def describe_versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def command_html(command: str) -> str:
    """A command in which lines break only between words, not at the hyphens of a flag; the words
    of a long path may break."""
    words = [html.escape(word, quote=False) for word in command.split()]
    words = [f"<span>{word}</span>" if len(word) <= LONG else word for word in words]
    return f'<code class="command">{" ".join(words)}</code>'


def name_html(name: str) -> str:
    """A name in which lines may break after an underscore."""
    return f'<code class="name">{html.escape(name).replace("_", "_<wbr>")}</code>'


def indent(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


# -- charts ----------------------------------------------------------------------------------


def charts_html(
    groups: list[Group],
    published: Published,
    controls: bool = True,
    labels: dict[str, str] | None = None,
) -> str:
    """The data of curves.js: one chart per environment, with published results dashed. `labels`
    has other names for the lines, by script; without it they are the experiments' names."""
    label = lambda group: (labels or {}).get(group.script, group.name)  # noqa: E731
    charts = []
    for env_id in dict.fromkeys(group.env_id for group in groups):
        here = [group for group in groups if group.env_id == env_id]
        lines = [{"name": label(group), "runs": curves_of(group)} for group in here]
        same = len({group.script for group in here}) == 1
        cited = published.get((here[0].script, env_id), [])[:1] if same else []
        marks = [mark(row) for row in cited]
        charts.append({"env": env_id, "marks": marks, "lines": lines})
    names = {label(group) for group in groups}
    data = {"colors": colors(len(names)), "charts": charts, "controls": controls}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<div class="curves"><script type="application/json">{text}</script></div>'


def mark(row: dict[str, str]) -> dict[str, Any]:
    return {"label": f"{row['what']}, {int(row['steps']):,} steps", "value": float(row["mean"])}
