"""What the documentation takes from the code and from benchmark/results, so that it cannot drift.

    make docs                                       # mkdocs calls the on_... functions
    python -m cleanrl_utils.docs                    # the README's table and curves, written anew
    python -m cleanrl_utils.docs --gif runs/NAME    # a film of a saved model, docs/assets/ENV.gif

On a page, `{{ flags ppo.py }}`, `{{ metrics }}`, `{{ results }}` and others (`Pages.make_...`) are
filled in; without a script's name they are about all scripts of the page. A link like
`[text](src:ppo.py#"code")` leads to the one line of cleanrl/ppo.py that holds this code; what the
paragraph says is shown there as a note. A link to code that is not there, or a tag that
get-started/metrics.md does not explain, is a warning: it ends `mkdocs build --strict`.
"""

import argparse
import ast
import csv
import difflib
import html
import json
import logging
import posixpath
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleanrl_utils import results
from cleanrl_utils.analysis.palette import COLORS
from cleanrl_utils.pages.scripts import ORIGINAL, ROOT, Flag, Script, read_scripts, shared_flags

DOCS = ROOT / "docs"
PUBLISHED = ROOT / "benchmark" / "published.csv"
log = logging.getLogger("mkdocs.hooks.cleanrl")

LINK = re.compile(
    r'\[(?P<text>[^\]]+)\]\(src:(?P<file>[\w/]+\.py)(?:#"(?P<code>(?:\\"|[^"])+)")?\)', re.S
)
DIRECTIVE = re.compile(r"^\{\{ (?P<name>\w+)(?: (?P<what>[\w./]+))? \}\}$", re.M)
FENCE = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)$", re.S | re.M)
MANY = 12  # environments without a run of ours; more of them are folded away
CONTEXT = 3  # equal lines around a difference


# -- results ---------------------------------------------------------------------------------


def published() -> dict[tuple[str, str], list[dict[str, str]]]:
    """Figures of the original, by script and environment: theirs, never ours."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    with open(PUBLISHED) as file:
        for row in csv.DictReader(file):
            found.setdefault((row["script"], row["env_id"]), []).append(row)
    return found


def result_facts(folder: Path = results.COMMITTED) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("*.json"))
    return [fact for path in paths for fact in json.loads(path.read_text()) if "script" in fact]


@dataclass
class Group:
    """Runs of one experiment on one environment, as long as each other."""

    name: str
    script: str
    env_id: str
    steps: int
    runs: list[dict[str, Any]]

    def column(self, key: str) -> list[Any]:
        return [run[key] for run in self.runs if run[key] == run[key]]  # not NaN

    def score(self) -> str:
        final = self.column("final_return")
        return spread(statistics.fmean(final), statistics.pstdev(final)) if final else "–"

    def best(self) -> str:
        best = self.column("best_return")
        return f"{statistics.fmean(best):,.2f}" if best else "–"

    def speed(self) -> float:
        return statistics.median(run["steps"] / max(run["seconds"], 1e-9) for run in self.runs)


def groups(facts: list[dict[str, Any]]) -> list[Group]:
    found: dict[tuple, Group] = {}
    for fact in facts:
        key = fact["script"], fact["exp_name"], fact["env_id"], fact["steps"]
        group = found.setdefault(key, Group(key[1], key[0], key[2], key[3], []))
        group.runs.append(fact)
    return list(found.values())


def curves(exp_name: str, folder: Path = results.COMMITTED) -> dict[str, list[list[list[float]]]]:
    """For each run its curve: steps, minutes, returns."""
    found: dict[str, list[list[list[float]]]] = {}
    if not (path := folder / f"{exp_name}.csv").exists():
        return found
    with open(path) as file:
        for row in csv.DictReader(file):
            curve = found.setdefault(row["run"], [[], [], []])  # type: ignore[arg-type]
            values = int(row["step"]), float(row["seconds"]) / 60, float(row["episodic_return"])
            for column, value in zip(curve, values, strict=True):
                column.append(float(f"{value:.5g}"))  # type: ignore[arg-type]
    return found


# -- code as HTML ----------------------------------------------------------------------------


Marks = dict[int, set[int]]  # columns of a line that stand out


def highlight(source: str, marks: Marks | None = None) -> list[str]:
    """Its lines as HTML, in the colours of the site."""
    from pygments.lexers import PythonLexer
    from pygments.token import STANDARD_TYPES

    lines, column = [""], 0
    for kind, text in PythonLexer(stripnl=False).get_tokens(source):
        while kind not in STANDARD_TYPES:
            kind = kind.parent
        for part in re.split(r"(\n)", text):
            if part == "\n":
                lines.append("")
                column = 0
                continue
            marked = (marks or {}).get(len(lines) - 1, set())
            for run in pieces(part, column, marked):
                code = (
                    f'<span class="{STANDARD_TYPES[kind]}">{html.escape(run, quote=False)}</span>'
                )
                lines[-1] += f"<mark>{code}</mark>" if column in marked else code
                column += len(run)
    return lines[: len(source.splitlines())]


def pieces(text: str, column: int, marked: set[int]) -> Iterator[str]:
    """The text, which begins in this column, cut where marks begin and end."""
    start = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or (column + i in marked) != (column + i - 1 in marked):
            yield text[start:i]
            start = i


def changed_words(left: list[str], right: list[str]) -> tuple[Marks, Marks]:
    """Where replaced lines differ from what replaced them, if they are still alike."""
    marks: tuple[Marks, Marks] = {}, {}
    for kind, i1, i2, j1, j2 in diff_blocks(left, right):
        for i, j in zip(range(i1, i2), range(j1, j2)) if kind == "replace" else ():
            words = [re.findall(r"\w+|\s+|.", line) for line in (left[i], right[j])]
            matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False)
            if matcher.ratio() < 0.5:
                continue
            for side, number in ((0, i), (1, j)):
                starts, marked = [0], marks[side].setdefault(number, set())
                for word in words[side]:
                    starts.append(starts[-1] + len(word))
                for same, a1, a2, b1, b2 in matcher.get_opcodes():
                    first, last = (a1, a2) if side == 0 else (b1, b2)
                    if same != "equal":
                        marked.update(range(starts[first], starts[last]))
    return marks


def line_of(number: int, code: str, identify: bool = True, mark: str = "") -> str:
    name = f' id="L{number}"' if identify else ""
    href = f' href="#L{number}"' if identify else ""
    link = f'<a class="no"{href} data-no="{number}" aria-hidden="true" tabindex="-1"></a>'
    return f'<div class="line{mark}"{name}>{link}{code or " "}</div>'


def source_html(source: str, notes: dict[int, list[str]]) -> str:
    """A file with its notes, each below the line it explains."""
    out = []
    for number, code in enumerate(highlight(source), 1):
        out.append(line_of(number, code, mark=" noted" if number in notes else ""))
        out += [f'<div class="note">{note}</div>' for note in notes.get(number, [])]
    return f'<div class="highlight source">{"".join(out)}</div>'


def diff_blocks(left: list[str], right: list[str]) -> Sequence[tuple[str, int, int, int, int]]:
    return difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()


def diff_size(left: str, right: str) -> tuple[int, int]:
    """Lines that only the left and only the right file has."""
    blocks = diff_blocks(left.splitlines(), right.splitlines())
    changed = [block for block in blocks if block[0] != "equal"]
    return sum(b[2] - b[1] for b in changed), sum(b[4] - b[3] for b in changed)


def diff_html(left: Script, right: Script) -> str:
    """Both files beside each other; on a narrow screen one below the other, equal lines once."""
    marks = changed_words(left.source.splitlines(), right.source.splitlines())
    lines = [highlight(left.source, marks[0]), highlight(right.source, marks[1])]

    def column(side: int, start: int, end: int, mark: str) -> str:
        numbered = zip(range(start + 1, end + 1), lines[side][start:end], strict=True)
        rows = "".join(line_of(n, code, identify=False, mark=mark) for n, code in numbered)
        return f'<div class="side{" second" * side}">{rows}</div>'

    def block(kind: str, i1: int, i2: int, j1: int, j2: int) -> str:
        gone, new = ("", "") if kind == "equal" else (" gone", " new")
        both = column(0, i1, i2, gone) + column(1, j1, j2, new)
        return f'<div class="pair {kind}">{both}</div>'

    out = [f'<div class="pair names"><div>{left.name}.py</div><div>{right.name}.py</div></div>']
    blocks = diff_blocks(left.source.splitlines(), right.source.splitlines())
    for number, (kind, i1, i2, j1, j2) in enumerate(blocks):
        first = CONTEXT if number else 0
        last = CONTEXT if number < len(blocks) - 1 else 0
        if kind != "equal" or i2 - i1 <= first + last + CONTEXT:
            out.append(block(kind, i1, i2, j1, j2))
            continue
        out.append(block(kind, i1, i1 + first, j1, j1 + first) if first else "")
        hidden = f"{i2 - i1 - first - last} equal lines"
        inside = block(kind, i1 + first, i2 - last, j1 + first, j2 - last)
        out.append(f"<details><summary>{hidden}</summary>{inside}</details>")
        out.append(block(kind, i2 - last, i2, j2 - last, j2) if last else "")
    return f'<div class="highlight diff">{"".join(out)}</div>'


# -- pages -----------------------------------------------------------------------------------


class Pages:
    """All that a build knows: scripts, results, and what the written pages say about lines."""

    def __init__(self) -> None:
        self.scripts = read_scripts()
        self.facts = result_facts()
        self.groups = groups(self.facts)
        self.published = published()
        self.html: list[str] = []  # parts that Markdown must not touch
        self.placed: set[tuple[str, str]] = set()
        self.shown: set[str] = set()  # files of cleanrl_utils that pages link to
        self.notes: dict[str, dict[int, list[tuple[str, str, str, str]]]] = {}
        for path in sorted(DOCS.rglob("*.md")):
            self.collect_notes(path)

    # .. links to lines ..

    def find_line(self, file: str, code: str | None) -> tuple[str, int]:
        """(page that shows it, line); raises LookupError if the code is not there exactly once."""
        path = ROOT / file if "/" in file else ROOT / "cleanrl" / file
        if not path.is_file():
            raise LookupError(f"there is no {file}")
        page = f"source/{file.removesuffix('.py')}.md"
        if code is None:
            return page, 1
        code = code.replace('\\"', '"')
        found = [n for n, line in enumerate(path.read_text().splitlines(), 1) if code in line]
        if len(found) != 1:
            raise LookupError(f"{file} has {len(found)} lines with {code!r}, not one")
        return page, found[0]

    def collect_notes(self, path: Path) -> None:
        """What a page says where it links to a line is shown beside that line, too."""
        from markdown.extensions.toc import slugify, unique

        used: set[str] = set()
        anchor, uri = "", path.relative_to(DOCS).as_posix()
        title = uri
        for block in re.split(r"\n(?=\n|[-*] |\d+\. |#)", FENCE.sub("", path.read_text())):
            heading = re.match(r"\s*(#+) (.+)", block)
            if heading:
                anchor = unique(slugify(heading[2].replace("`", ""), "-"), used)
                title = heading[2] if heading[1] == "#" else title
            for link in LINK.finditer(block):
                try:
                    _, line = self.find_line(link["file"], link["code"])
                except LookupError:
                    continue  # `resolve` warns
                if "/" in link["file"]:
                    self.shown.add(link["file"])
                text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block.strip())
                notes = self.notes.setdefault(link["file"], {}).setdefault(line, [])
                if (uri, anchor) not in [note[:2] for note in notes] and link["code"]:
                    notes.append((uri, anchor, inline(text), inline(title)))

    def resolve(self, markdown: str, page: Any, files: Any) -> str:
        def link(match: re.Match) -> str:
            try:
                target, line = self.find_line(match["file"], match["code"])
            except LookupError as error:
                log.warning(f"{page.file.src_uri}: link to code: {error}")
                return match["text"]
            url = relative_url(files, target, page)
            return f'<a class="src" href="{url}#L{line}">{match["text"]}</a>'

        return outside_code(markdown, lambda text: LINK.sub(link, text))

    # .. directives ..

    def fill(self, markdown: str, page: Any) -> str:
        """Replace `{{ name what }}` by what `make_name` returns for these scripts."""

        def directive(match: re.Match) -> str:
            make = getattr(self, f"make_{match['name']}", None)
            if make is None:
                log.warning(f"{page.file.src_uri}: there is no {match[0]}")
                return ""
            return make(self.meant(match["what"], page), match["what"])

        return outside_code(markdown, lambda text: DIRECTIVE.sub(directive, text))

    def meant(self, what: str | None, page: Any) -> list[Script]:
        if what and what.endswith(".py") and what[:-3] in self.scripts:
            return [self.scripts[what[:-3]]]
        if what == "jax":
            return [script for script in self.scripts.values() if "RunsArgs" in script.bases]
        if what and what.endswith(".py") and "/" not in what:
            log.warning(f"{page.file.src_uri}: there is no script {what}")
            return []
        return [script for script in self.scripts.values() if script.page == page.file.src_uri]

    def make_overview(self, scripts: list[Script], what: str | None) -> str:
        return overview(self, "../", source="../source/")

    def make_install(self, scripts: list[Script], what: str | None) -> str:
        """How to add a family of environments, in a tab for each tool."""
        extras = {"dm_control": "mujoco dm_control"}.get(what or "", what)
        pins = f"requirements/requirements-{what}.txt"
        ways = {
            "pip": f"pip install -r {pins}",
            "uv": f"uv pip install -r {pins}",
            "poetry": f'poetry install -E "{extras}"',
            "make": f"make install-{what}",
        }
        tab = '=== "{}"\n\n    ```bash\n    {}\n    ```'
        return "\n\n".join(tab.format(tool, command) for tool, command in ways.items())

    def make_missing(self, scripts: list[Script], what: str | None) -> str:
        return ", ".join(f"`{name}.py`" for name in ORIGINAL if name not in self.scripts)

    def make_scripts(self, scripts: list[Script], what: str | None) -> str:
        rows = ["| script | observations, actions | what it is | read |", "|-|-|-|-|"]
        for script in scripts:
            read = f"[code](../source/{script.name}.md)"
            if script.relative:
                gone, new = diff_size(self.scripts[script.relative].source, script.source)
                diff = f"../source/{script.name}-diff.md"
                read += f", [beside `{script.relative}.py`]({diff}) (−{gone} +{new})"
            rows.append(f"| `{script.name}.py` | {script.spaces} | {script.title} | {read} |")
        return "\n".join(rows)

    def make_flags(self, scripts: list[Script], what: str | None) -> str:
        if what == "shared":
            out = []
            titles = {
                "RunArgs": "Every script",
                "TorchArgs": "Scripts in torch",
                "PixelArgs": "Scripts in torch that step pictures by Gymnasium",
                "RunsArgs": "JAX, end to end",
            }
            for cls, flags in shared_flags().items():
                out.append(flag_table(f"### {titles[cls]}", flags))
            return "\n\n".join(out)
        out = []
        for script in scripts:
            self.placed.add(("flags", script.name))
            table = flag_table("", script.flags).strip()
            out.append(
                f'??? note "Flags of `{script.name}.py`, beside the shared ones"\n\n'
                + indent(table)
            )
        return "\n\n".join(out)

    def make_metrics(self, scripts: list[Script], what: str | None) -> str:
        """What these scripts log, in the words of get-started/metrics.md."""
        meanings = metric_meanings()
        tags: dict[str, list[str]] = {}
        for script in scripts:
            self.placed.add(("metrics", script.name))
            for tag in script.tags:
                tags.setdefault(tag, []).append(script.name)
        rows = ["| tag | meaning |", "|-|-|"]
        for tag, names in tags.items():
            if tag not in meanings:
                log.warning(f"get-started/metrics.md does not explain {tag} of {names[0]}.py")
                continue
            only = (
                "" if len(names) == len(scripts) else f" ({', '.join(f'`{n}.py`' for n in names)})"
            )
            rows.append(f"| `{tag}` | {meanings[tag]}{only} |")
        return "\n".join(rows)

    def make_results(self, scripts: list[Script], what: str | None) -> str:
        return "\n\n".join(self.results_of(script) for script in scripts)

    def results_of(self, script: Script) -> str:
        self.placed.add(("results", script.name))
        mine = [group for group in self.groups if group.script == script.name]
        theirs = {env: rows for (name, env), rows in self.published.items() if name == script.name}
        head = f"**`{script.name}.py`**\n\n"
        if not mine and not theirs:
            return head + "Our runs are not done yet, and we know of no published ones."
        rows = ["| environment | ours | best | seeds | steps | minutes | the original's |"]
        rows.append("|-|-|-|-|-|-|-|")
        for group in mine:
            name = "" if group.name == script.name else f" (`{group.name}`)"
            minutes = statistics.fmean(group.column("seconds")) / 60
            figure = cite(theirs.get(group.env_id, []), group.steps)
            rows.append(
                f"| `{group.env_id}`{name} | {group.score()} | {group.best()} | {len(group.runs)}"
                f" | {group.steps:,} | {minutes:,.1f} | {figure} |"
            )
        done = {group.env_id for group in mine}
        left = [
            f"| `{x}` | not run yet | | | | | {cite(theirs[x])} |" for x in theirs if x not in done
        ]
        few = left if len(left) <= MANY else []
        out = [head.strip()]
        if mine or few:
            out.append("\n".join(rows + few))
        out.append((EXPLAIN if mine else EXPLAIN_THEIRS) + commands(script.name))
        if mine:
            out += [self.keep(self.curves_html(mine, theirs)), provenance(mine)]
        if left and not few:
            title = f"The original's figures for {len(left)} environments that we have not run yet"
            out.append(f'??? note "{title}"\n\n' + indent("\n".join([*rows[:2], *left])))
        return "\n\n".join(out)

    def make_everything(self, scripts: list[Script], what: str | None) -> str:
        """All results: a table, and for each environment a chart with all that ran on it."""
        rows = ["| environment | script | ours | seeds | steps | minutes | the original's |"]
        rows.append("|-|-|-|-|-|-|-|")
        every = sorted(self.groups, key=lambda group: (group.env_id, group.name, group.steps))
        for group in every:
            script = self.scripts.get(group.script)
            page = posixpath.basename(script.page) if script else "overview.md"
            theirs = cite(self.published.get((group.script, group.env_id), []), group.steps)
            minutes = statistics.fmean(group.column("seconds")) / 60
            cells = [f"`{group.env_id}`", f"[`{group.name}`]({page})", group.score()]
            cells += [str(len(group.runs)), f"{group.steps:,}", f"{minutes:,.1f}", theirs]
            rows.append(f"| {' | '.join(cells)} |")
        return "\n".join(rows) + "\n\n" + self.keep(self.curves_html(every, {}))

    def curves_html(self, mine: list[Group], theirs: dict[str, list[dict[str, str]]]) -> str:
        charts = []
        known = {name: curves(name) for name in {group.name for group in mine}}
        for env_id in dict.fromkeys(group.env_id for group in mine):
            marks = [
                {
                    "label": f"{row['what']}, {int(row['steps']):,} steps",
                    "value": float(row["mean"]),
                }
                for row in theirs.get(env_id, [])[:1]
            ]
            lines = []
            for group in mine:
                if group.env_id == env_id:
                    runs = [
                        known[group.name][run["run"]]
                        for run in group.runs
                        if run["run"] in known[group.name]
                    ]
                    lines.append({"name": group.name, "runs": runs})
            charts.append({"env": env_id, "marks": marks, "lines": lines})
        text = json.dumps({"colors": COLORS, "charts": charts}, separators=(",", ":"))
        data = text.replace("<", "\\u003c")
        return f'<div class="curves"><script type="application/json">{data}</script></div>'

    def make_source(self, scripts: list[Script], what: str | None) -> str:
        file = what or ""
        path = ROOT / "cleanrl" / file if (ROOT / "cleanrl" / file).is_file() else ROOT / file
        return self.keep(f"SOURCE {path.relative_to(ROOT)}")

    def make_diff(self, scripts: list[Script], what: str | None) -> str:
        (script,) = scripts
        return self.keep(diff_html(self.scripts[script.relative or ""], script))

    def make_example(self, scripts: list[Script], what: str | None) -> str:
        """A file of docs/examples beside the script that its name continues."""
        path = ROOT / (what or "")
        example = Script(path.stem, path.read_text(), set(self.scripts))
        return self.keep(diff_html(self.scripts[example.relative or ""], example))

    def keep(self, text: str) -> str:
        """A mark for HTML that goes in when Markdown is through."""
        self.html.append(text)
        return f'<div data-part="{len(self.html) - 1}"></div>'

    def put_back(self, text: str, page: Any, files: Any) -> str:
        def part(match: re.Match) -> str:
            kept = self.html[int(match[1])]
            return self.with_notes(kept[7:], page, files) if kept.startswith("SOURCE ") else kept

        return re.sub(r'<div data-part="(\d+)"></div>', part, text)

    def with_notes(self, path: str, page: Any, files: Any) -> str:
        file = path.removeprefix("cleanrl/")
        home = self.scripts[file[:-3]].page if file[:-3] in self.scripts else ""
        notes = {}
        for line, every in self.notes.get(file, {}).items():
            own = [note for note in every if note[0] == home] or every
            notes[line] = [
                f'{text} <a href="{relative_url(files, uri, page)}#{anchor}">{title}</a>'
                for uri, anchor, text, title in own
            ]
        return source_html((ROOT / path).read_text(), notes)

    def unplaced(self, page: Any) -> str:
        """Flags, metrics and results of scripts that their page does not mention by itself."""
        out = []
        for kind, title in (("metrics", "Metrics"), ("flags", "Flags"), ("results", "Results")):
            mine = self.meant(None, page)
            left = [x for x in mine if (kind, x.name) not in self.placed]
            if left:
                out.append(f"## {title}" + (" of the other scripts" if left != mine else ""))
                out.append(getattr(self, f"make_{kind}")(left, None))
        return "\n\n".join(out)

    def generated(self) -> Iterator[tuple[str, str]]:
        """(path, Markdown) of the pages that are not written by hand."""
        plain = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"
        index = [plain, "# The code", INDEX, self.make_scripts(list(self.scripts.values()), None)]
        yield "source/index.md", "\n\n".join(index).replace("../source/", "")
        for script in self.scripts.values():
            name = script.name
            jumps = [
                f'<a href="#L{node.lineno}">{node.name}</a>'
                for node in script.tree.body
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            ]
            about = f"{script.title}. [Its page](../{script.page}), [the file](./{name}.py)"
            if script.relative:
                about += f", [beside `{script.relative}.py`]({name}-diff.md)"
            parts = [plain, f"# {name}.py", f"{about}.", f"{' · '.join(jumps)}\n{{: .jumps }}"]
            yield f"source/{name}.md", "\n\n".join([*parts, f"{{{{ source {name}.py }}}}"])
            if script.relative:
                first = script.relative
                gone, new = diff_size(self.scripts[first].source, script.source)
                about = f"{gone} lines go, {new} come."
                about += f" [`{first}.py`]({first}.md), [`{name}.py`]({name}.md)."
                parts = [plain, f"# {first}.py → {name}.py", about, f"{{{{ diff {name}.py }}}}"]
                yield f"source/{name}-diff.md", "\n\n".join(parts)
        for file in sorted(self.shown):
            text = f"{plain}\n# {file}\n\n{self.make_source([], file)}\n"
            yield f"source/{file.removesuffix('.py')}.md", text
        yield "changelog.md", (ROOT / "CHANGELOG.md").read_text()
        yield "contribution.md", (ROOT / "CONTRIBUTING.md").read_text()


INDEX = """Every script with the notes of its page beside the lines they are about, and beside the
script it is closest to. *−12 +40* counts lines that go and come."""
EXPLAIN = """Mean ± standard deviation over seeds of each run's last 100 episodes; *best* is the
mean of each run's best 100 in a row. The dashed line is the original's figure: theirs, not ours."""
EXPLAIN_THEIRS = "Our runs are not done yet; the figures are the original's."
COLUMNS = ["script", "observations, actions", "environments", "backend", "what it can", "lines"]
COLUMNS += ["speed", "results"]


def overview(pages: Pages, docs: str, source: str = "") -> str:
    """The table of all scripts."""
    rows = [f"| {' | '.join(COLUMNS)} |", "|-" * len(COLUMNS) + "|"]
    for script in pages.scripts.values():
        mine = [group for group in pages.groups if group.script == script.name]
        speed = f"{statistics.median(g.speed() for g in mine):,.0f}/s" if mine else ""
        count = (
            f"{len({g.env_id for g in mine})} ({sum(len(g.runs) for g in mine)})"
            if mine
            else "not yet"
        )
        link = f"[`{script.name}.py`]({docs}{script.page}#{script.name}py)"
        if source:
            link = f"[`{script.name}.py`]({source}{script.name}.md)"
            count = f"[{count}]({docs}{script.page})"
        rows.append(
            f"| {link} | {script.spaces} | {script.families} | {'JAX' if script.jax else 'torch'}"
            f" | {script.features} | {script.lines} | {speed} | {count} |"
        )
    return "\n".join(rows)


def flag_table(title: str, flags: list[Flag]) -> str:
    rows = [title, "", "| flag | default | meaning |", "|-|-|-|", *(flag.row() for flag in flags)]
    return "\n".join(rows)


def metric_meanings() -> dict[str, str]:
    text = (DOCS / "get-started" / "metrics.md").read_text()
    return dict(re.findall(r"^\| `([\w/-]+)` \| (.+) \|$", text, re.M))


def spread(mean: float, std: float | None) -> str:
    """A figure that no line break comes into."""
    return f"{mean:,.2f}" + (f"\u00a0±\u00a0{std:,.2f}" if std is not None else "")


def cite(rows: list[dict[str, str]], ours: int = 0) -> str:
    """The original's figures with where they stand, and their steps unless as many as ours."""
    figures = []
    for row in rows:
        figure = spread(float(row["mean"]), float(row["std"]) if row["std"] else None)
        theirs = int(row["steps"])
        steps = "" if abs(theirs - ours) < 0.02 * theirs else f", {theirs:,} steps"
        figures.append(f"{figure} ([{row['what']}]({row['source']}){steps})")
    return "; ".join(figures)


def commands(name: str) -> str:
    """Where the commands of a script's results are."""
    files = sorted((ROOT / "benchmark").glob("*.sh"))
    found = [x.name for x in files if re.search(rf"\b{name}\b", x.read_text())]
    return f" Commands: {', '.join(f'`sh benchmark/{x}`' for x in found)}." if found else ""


def provenance(mine: list[Group]) -> str:
    """Commands, commits and hardware of runs, folded away."""
    lines = [
        "| environment | command, without its seed | commit | hardware | versions |",
        "|-|-|-|-|-|",
    ]
    for group in mine:
        commands = {re.sub(r" --seed \d+", "", run["command"]) for run in group.runs}
        command = "<br>".join(f"`{command}`" for command in sorted(commands))
        commits = ", ".join(
            sorted({x["commit"] + ("*" if x.get("dirty") else "") for x in group.runs})
        )
        sets = {", ".join(f"{k} {v}" for k, v in run["versions"].items()) for run in group.runs}
        versions = "; ".join(sorted(sets))
        hardware = "; ".join(sorted(set(group.column("hardware"))))
        lines.append(f"| `{group.env_id}` | {command} | {commits} | {hardware} | {versions} |")
    if any(run.get("dirty") for group in mine for run in group.runs):
        lines.append("\n\\* with changes that were not committed")
    return '??? note "Commands, commits, hardware"\n\n' + indent("\n".join(lines))


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Markdown changed everywhere but in its blocks of code."""
    out, at = "", 0
    for code in FENCE.finditer(markdown):
        out += change(markdown[at : code.start()]) + code[0]
        at = code.end()
    return out + change(markdown[at:])


def indent(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


def inline(markdown: str) -> str:
    """A few words of Markdown as HTML: bold, code; links are their text."""
    text = LINK.sub(lambda match: match["text"], markdown)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    text = html.escape(" ".join(text.split()), quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def relative_url(files: Any, src_uri: str, page: Any) -> str:
    from mkdocs.utils import get_relative_url

    return get_relative_url(files.get_file_from_path(src_uri).url, page.file.url)


# -- the hook ----------------------------------------------------------------------------------

state: dict[str, Any] = {}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = state["pages"] = Pages()
    texts = dict(pages.generated())
    texts |= {f"source/{x.name}.py": x.source for x in pages.scripts.values()}
    texts["javascripts/chart.js"] = (ROOT / "cleanrl_utils" / "analysis" / "chart.js").read_text()
    for path, text in texts.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    pages = state["pages"]
    markdown = pages.fill(markdown, page)
    if page.file.src_uri.startswith("rl-algorithms/"):
        markdown += "\n\n" + pages.unplaced(page)
    return pages.resolve(markdown, page, files)


def on_page_content(text: str, page: Any, config: Any, files: Any) -> str:
    return state["pages"].put_back(text, page, files)


# -- the README ----------------------------------------------------------------------------------

TABLE = re.compile(r"(<!-- scripts: .*? -->\n).*?(<!-- end -->)", re.S)
PANELS = 8


def readme_table() -> str:
    """Algorithms and their scripts; nothing in it changes with every result."""
    algorithms: dict[str, list[Script]] = {}
    for script in read_scripts().values():
        algorithms.setdefault(script.page, []).append(script)
    rows = ["| algorithm | scripts |", "|-|-|"]
    for page, scripts in algorithms.items():
        title = (DOCS / page).read_text().splitlines()[0].removeprefix("# ")
        names = ", ".join(f"[`{x.name}.py`](cleanrl/{x.name}.py)" for x in scripts)
        rows.append(f"| [{title}](docs/{page}) | {names} |")
    return "\n".join(rows)


def fill_readme(text: str) -> str:
    return TABLE.sub(lambda match: f"{match[1]}{readme_table()}\n{match[2]}", text)


def draw_curves(path: Path) -> None:
    """Learning curves where there are most runs, beside the original's figures (dashed)."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    theirs, panels = published(), dict[str, list[Group]]()
    for group in groups(result_facts()):
        if len(group.runs) > 1:
            panels.setdefault(group.env_id, []).append(group)
    most = sorted(panels.items(), key=lambda item: -sum(len(group.runs) for group in item[1]))
    shown = dict(most[:PANELS])
    names = sorted({group.name for mine in shown.values() for group in mine})
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 2.4 * rows), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    for axis, (env_id, mine) in zip(axes.flat, shown.items(), strict=False):
        for group in mine:
            color, known = COLORS[names.index(group.name) % len(COLORS)], curves(group.name)
            runs = [known[run["run"]] for run in group.runs if run["run"] in known]
            x = np.linspace(0, group.steps, 100)
            y = np.array([np.interp(x, steps, values) for steps, _, values in runs])
            low, high = y.mean(0) - y.std(0), y.mean(0) + y.std(0)
            axis.plot(x, y.mean(0), color=color, linewidth=1.5, label=f"{group.name} ({len(runs)})")
            axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
            for row in theirs.get((group.script, env_id), [])[:1]:
                axis.axhline(float(row["mean"]), color=color, linestyle="--", linewidth=1)
        axis.set_title(env_id, fontsize=9)
        axis.legend(fontsize=6, loc="best", framealpha=0.6)
        axis.tick_params(labelsize=7)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        axis.xaxis.offsetText.set_fontsize(7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def film(run: str, folder: Path = DOCS / "assets", seconds: float = 6, width: int = 300) -> Path:
    """A GIF of one episode of a saved model, without its tail if it is long."""
    import contextlib
    import tempfile

    import imageio.v3
    from PIL import Image

    from cleanrl_utils import enjoy
    from cleanrl_utils.running import evaluation

    model = enjoy.find_model(enjoy.EnjoyArgs(run=run)).resolve()
    agent, args, module = evaluation.load_model(model)
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        policy = evaluation.as_policy(agent)
        evaluation.play(policy, module.make_env, args.env_id, 1, 1, True, "film")
        (video,) = Path(place).rglob("*.mp4")
        frames = imageio.v3.imread(video)
        fps = imageio.v3.immeta(video)["fps"]
    every = max(1, round(fps / 20))
    pictures = [Image.fromarray(frame) for frame in frames[: int(seconds * fps) : every]]
    size = (width, round(width * pictures[0].height / pictures[0].width))
    small = [picture.resize(size).quantize(64) for picture in pictures]
    path = folder / f"{args.env_id.split('-')[0].lower()}.gif"
    options = dict(duration=round(1000 * every / fps), loop=0, optimize=True)
    small[0].save(path, save_all=True, append_images=small[1:], **options)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the README's table and pictures anew.")
    parser.add_argument("--gif", metavar="RUN", help="only film the saved model of this run")
    options = parser.parse_args()
    if options.gif:
        print(film(options.gif))
        return
    readme = ROOT / "README.md"
    readme.write_text(fill_readme(readme.read_text()))
    draw_curves(DOCS / "assets" / "curves.png")
    print("README.md and docs/assets/curves.png are written")


if __name__ == "__main__":
    main()
