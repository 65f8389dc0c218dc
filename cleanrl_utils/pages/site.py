"""The generated parts of the site."""

import ast
import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cleanrl_utils.pages import (
    films,
    notes,
    overview,
    reference,
    results,
    speed,
    suite,
    tuned,
    which_one,
)
from cleanrl_utils.pages.code import source_html
from cleanrl_utils.pages.diffs import diff_html, diff_size
from cleanrl_utils.pages.scripts import ROOT, Script, read_scripts
from cleanrl_utils.running.zoo import read_zoo

DOCS = ROOT / "docs"
DIRECTIVE = re.compile(r"^\{\{ (?P<name>\w+)(?: (?P<what>[\w./]+))? \}\}$", re.M)
PART = re.compile(r'<div data-part="(\d+)"></div>')
INDEX = """*Code* is the script with the notes of its page beside the lines they explain. *Diff* is
its difference from the most similar script; *−12 +40* counts removed and added lines."""
log = logging.getLogger("mkdocs.hooks.cleanrl")
Render = Callable[[Any, Any], str]  # (page, files) -> HTML
SHOWN = [  # environments of the curves on the home page and in the README
    "CartPole-v1",
    "Acrobot-v1",
    "Pong-v5",
    "HalfCheetah-v4",
    "Walker2d-v4",
    "dm_control/ball_in_cup-catch-v0",
]


class Site:
    """Scripts, results, videos, and the notes of pages about lines of code."""

    def __init__(self) -> None:
        self.scripts = read_scripts()
        self.groups = results.read_groups()
        self.published = results.read_published()
        self.films = films.read_films()
        self.notes = notes.collect_notes(DOCS)
        self.parts: list[Render] = []  # HTML kept from Markdown
        self.placed: set[tuple[str, str]] = set()  # (kind, script) that a page has already shown

    # -- links to lines ----------------------------------------------------------------------

    def resolve(self, markdown: str, page: Any, files: Any) -> str:
        """Resolve `src:` links to lines of code; a broken link is a warning."""

        def link(match: re.Match) -> str:
            try:
                target, line = notes.find_line(match["file"], match["code"])
            except LookupError as error:
                log.warning(f"{page.file.src_uri}: link to code: {error}")
                return match["text"]
            url = relative_url(files, target, page)
            return f'<a class="src" href="{url}#L{line}">{match["text"]}</a>'

        return outside_code(markdown, lambda text: notes.LINK.sub(link, text))

    # -- directives --------------------------------------------------------------------------

    def fill(self, markdown: str, page: Any) -> str:
        """Replace `{{ name what }}` by the result of `make_name`."""

        def directive(match: re.Match) -> str:
            make = getattr(self, f"make_{match['name']}", None)
            if make is None:
                log.warning(f"{page.file.src_uri}: there is no {match[0]}")
                return ""
            return make(self.scripts_meant(match["what"], page), match["what"])

        return outside_code(markdown, lambda text: DIRECTIVE.sub(directive, text))

    def scripts_meant(self, what: str | None, page: Any) -> list[Script]:
        """The script that a directive names, else all scripts of the page."""
        if what and what.endswith(".py") and what[:-3] in self.scripts:
            return [self.scripts[what[:-3]]]
        if what == "jax":
            return [script for script in self.scripts.values() if "RunsArgs" in script.bases]
        if what and what.endswith(".py") and "/" not in what:
            log.warning(f"{page.file.src_uri}: there is no script {what}")
            return []
        return [script for script in self.scripts.values() if script.page == page.file.src_uri]

    def make_overview(self, scripts: list[Script], what: str | None) -> str:
        return overview.overview_table(self.scripts, self.groups)

    def make_algorithms(self, scripts: list[Script], what: str | None) -> str:
        return overview.algorithm_cards(self.scripts)

    def make_scripts(self, scripts: list[Script], what: str | None) -> str:
        return overview.scripts_table(scripts, self.scripts)

    def make_install(self, scripts: list[Script], what: str | None) -> str:
        return reference.install_tabs(what or "")

    def make_flags(self, scripts: list[Script], what: str | None) -> str:
        if what == "shared":
            return reference.shared_flag_tables()
        self.placed |= {("flags", script.name) for script in scripts}
        return reference.flag_tables(scripts)

    def make_metrics(self, scripts: list[Script], what: str | None) -> str:
        self.placed |= {("metrics", script.name) for script in scripts}
        return reference.metric_table(scripts)

    def make_results(self, scripts: list[Script], what: str | None) -> str:
        self.placed |= {("results", script.name) for script in scripts}
        return "\n\n".join(self.results_of(script) for script in scripts)

    def results_of(self, script: Script) -> str:
        """The results of a script: table, curves, videos, commands and hardware."""
        mine = [group for group in self.groups if group.script == script.name]
        filmed = [film for film in self.films if film.script == script.name]
        table, folded = results.results_table(script.name, mine, self.published)
        out = [f"**`{script.name}.py`**"]
        if not table and not folded:
            out.append(results.NO_RUN)
            return "\n\n".join([*out, self.keep_films(filmed)])
        explain = results.explain(mine, self.published) if mine else results.EXPLAIN_PUBLISHED
        out += [table, explain + results.commands_of(script.name)]
        if mine:
            out.append(self.keep(results.charts_html(mine, self.published)))
        out.append(self.keep_films(filmed))
        if mine:
            out.append(results.provenance(mine))
        return "\n\n".join(part for part in [*out, folded] if part)

    def make_everything(self, scripts: list[Script], what: str | None) -> str:
        """All results as a table."""
        pages = {x.name: posixpath.basename(x.page) for x in self.scripts.values()}
        return results.everything_table(self.groups_by_environment(), pages, self.published)

    def make_charts(self, scripts: list[Script], what: str | None) -> str:
        """All results as one chart per environment."""
        return self.keep(results.charts_html(self.groups_by_environment(), {}))

    def groups_by_environment(self) -> list[results.Group]:
        return sorted(self.groups, key=lambda group: (group.env_id, group.name, group.steps))

    def make_contest(self, scripts: list[Script], what: str | None) -> str:
        """Algorithms for continuous control: tables at equal steps and minutes, and a chart."""
        found = which_one.contests(self.groups)
        if not found:
            return which_one.NOTHING
        out = [self.keep(which_one.chart(found)), which_one.missing(found)]
        out += ["## After equal steps", which_one.table(found, which_one.STEPS)]
        out += ["## After equal minutes", which_one.table(found, which_one.MINUTES)]
        out += ["Hardware:", which_one.hardware(found)]
        return "\n\n".join(part for part in out if part)

    def make_suite(self, scripts: list[Script], what: str | None) -> str:
        """The MinAtar suite: statistics across games, charts with intervals, a table by game."""
        before, charts, after, origin = suite.suite_page(self.groups)
        return "\n\n".join([before, self.keep(charts), after, origin])

    def make_tuned(self, scripts: list[Script], what: str | None) -> str:
        """Tuned settings: commands, scores, curves."""
        shown = [tuned.entry_groups(entry, self.groups) for entry in tuned.entries()]
        mine = [group for groups in shown for group in groups]
        curves = self.keep(results.charts_html(mine, {}))
        parts = [tuned.tuned_table(self.groups), tuned.settings_table(), curves]
        parts.append(results.provenance(mine))
        return "\n\n".join(parts)

    def make_speed(self, scripts: list[Script], what: str | None) -> str:
        """Speed and memory of scripts, alone and beside other libraries, by hardware."""
        return speed.speed_tables()

    def make_curves(self, scripts: list[Script], what: str | None) -> str:
        """The learning curves of the home page."""
        return self.keep(results.charts_html(shown_groups(self.groups), {}, controls=False))

    def make_agents(self, scripts: list[Script], what: str | None) -> str:
        """The strip of agents with their returns."""
        agents = films.read_strip()
        alt = "; ".join(film.caption for film in agents)
        picture = f"![{alt}](assets/{films.STRIP.name}){{ .strip }}"
        return f"{picture}\n\n{agents_caption(agents, 'assets')}\n{{: .caption }}" if agents else ""

    def make_zoo(self, scripts: list[Script], what: str | None) -> str:
        """The models of the zoo, with their videos."""
        kept = read_zoo()
        rows = ["| name | return | episodes | steps | trained with |", "|-|-|-|-|-|"]
        for x in kept:
            cells = [
                results.name_html(x.name),
                f"{x.episodic_return:,.2f}",
                str(x.episodes),
                f"{x.steps:,}",
            ]
            rows.append(f"| {' | '.join([*cells, results.command_html(x.command)])} |")
        names = {x.name for x in kept}
        shown = [film for film in self.films if Path(film.file).stem in names]
        return "\n".join(rows) + "\n\n" + self.keep_films(shown)

    def make_source(self, scripts: list[Script], what: str | None) -> str:
        file = what or ""
        path = ROOT / "cleanrl" / file if (ROOT / "cleanrl" / file).is_file() else ROOT / file
        name = path.relative_to(ROOT).as_posix()
        return self.keep(lambda page, files: self.annotated(name, page, files))

    def make_diff(self, scripts: list[Script], what: str | None) -> str:
        (script,) = scripts
        return self.keep(diff_html(self.scripts[script.relative or ""], script))

    def make_example(self, scripts: list[Script], what: str | None) -> str:
        """A diff between a file of docs/examples and the script that it changes."""
        path = ROOT / (what or "")
        example = Script(path.stem, path.read_text(), set(self.scripts))
        return self.keep(diff_html(self.scripts[example.relative or ""], example))

    def unplaced(self, page: Any) -> str:
        """Flags, metrics and results of scripts that their page has not shown."""
        out = []
        for kind, title in (("metrics", "Metrics"), ("flags", "Flags"), ("results", "Results")):
            mine = self.scripts_meant(None, page)
            left = [script for script in mine if (kind, script.name) not in self.placed]
            if left:
                out.append(f"## {title}" + (" of the other scripts" if left != mine else ""))
                out.append(getattr(self, f"make_{kind}")(left, None))
        return "\n\n".join(out)

    # -- HTML inserted after Markdown --------------------------------------------------------

    def keep(self, part: str | Render) -> str:
        """A placeholder for HTML that `put_back` inserts."""
        self.parts.append((lambda page, files: part) if isinstance(part, str) else part)
        return f'<div data-part="{len(self.parts) - 1}"></div>'

    def keep_films(self, shown: list[films.Film]) -> str:
        if not shown:
            return ""

        def gallery(page: Any, files: Any) -> str:
            urls = [relative_url(files, f"assets/films/{film.file}", page) for film in shown]
            pairs = zip(urls, shown, strict=True)
            figures = "".join(films.film_html(url, film) for url, film in pairs)
            return f'<div class="films">{figures}</div>'

        return self.keep(gallery)

    def put_back(self, text: str, page: Any, files: Any) -> str:
        return PART.sub(lambda match: self.parts[int(match[1])](page, files), text)

    def annotated(self, path: str, page: Any, files: Any) -> str:
        """A file with notes; per line those of the script's own page, if it has any."""
        file = path.removeprefix("cleanrl/")
        script = self.scripts.get(file.removesuffix(".py"))
        home = script.page if script else ""
        shown = {}
        for line, there in self.notes.get(file, {}).items():
            own = [note for note in there if note.page == home] or there
            shown[line] = [self.note_html(note, page, files) for note in own]
        return source_html((ROOT / path).read_text(), shown)

    def note_html(self, note: notes.Note, page: Any, files: Any) -> str:
        url = relative_url(files, note.page, page)
        _, title = overview.split_title(note.title)
        return f'{note.text} <a class="from" href="{url}#{note.anchor}">{title}</a>'

    # -- generated pages ---------------------------------------------------------------------

    def generated(self) -> Iterator[tuple[str, str]]:
        """(path, Markdown) of each generated page."""
        yield "source/index.md", self.index_page()
        for script in self.scripts.values():
            yield f"source/{script.name}.md", self.source_page(script)
            if script.relative:
                yield f"source/{script.name}-diff.md", self.diff_page(script)
        for file in sorted(notes.linked_files(DOCS)):
            text = f"{front_matter('navigation')}\n# {file}\n\n{self.make_source([], file)}\n"
            yield f"source/{file.removesuffix('.py')}.md", text
        yield "changelog.md", (ROOT / "CHANGELOG.md").read_text()
        yield "contribution.md", (ROOT / "CONTRIBUTING.md").read_text()

    def index_page(self) -> str:
        table = overview.scripts_table(list(self.scripts.values()), self.scripts, source="")
        return "\n\n".join([front_matter("navigation, toc"), "# The code", INDEX, table])

    def source_page(self, script: Script) -> str:
        name = script.name
        about = f"{script.title}. [Its page](../{script.page}), [the file](./{name}.py)"
        if script.relative:
            about += f", [diff from `{script.relative}.py`]({name}-diff.md)"
        parts = [front_matter("navigation"), f"# {name}.py", f"{about}."]
        return "\n\n".join([*parts, f"{{{{ source {name}.py }}}}"])

    def diff_page(self, script: Script) -> str:
        name = script.name
        first = script.relative or ""
        removed, added = diff_size(self.scripts[first].source, script.source)
        about = f"{removed} lines removed, {added} added."
        about += f" [`{first}.py`]({first}.md), [`{name}.py`]({name}.md)."
        parts = [front_matter("navigation, toc"), f"# {first}.py → {name}.py", about]
        return "\n\n".join([*parts, f"{{{{ diff {name}.py }}}}"])

    def outline(self, src_uri: str) -> list[tuple[str, int]]:
        """(name, line) of the functions and classes of the file that a page shows."""
        name = src_uri.removeprefix("source/").removesuffix(".md")
        if src_uri == "source/index.md" or not src_uri.startswith("source/"):
            return []
        path = ROOT / "cleanrl" / f"{name}.py" if "/" not in name else ROOT / f"{name}.py"
        return code_outline(path.read_text()) if path.is_file() else []


def code_outline(source: str) -> list[tuple[str, int]]:
    """(name, line) of each class, function and `__main__` block of a file."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append((node.name, node.lineno))
        elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            found.append(("main", node.lineno))
    return found


def shown_groups(groups: list[results.Group]) -> list[results.Group]:
    """Results on the environments of SHOWN, in its order; no tuned and no small runs."""
    plain = [group for group in groups if group.name == group.script]
    return [group for env_id in SHOWN for group in plain if group.env_id == env_id]


def agents_caption(agents: list[films.Film], assets: str) -> str:
    """The caption of the strip: scripts, environments, returns, and a link to the commands."""
    words = [f"`{x.script}.py` on {x.env_id} scores {x.episodic_return:,.0f}" for x in agents]
    commands = f"[Commands]({assets}/{films.STRIP.stem}.json)."
    seeds = ", ".join(sorted({str(x.seed) for x in agents}))
    return (
        f"One greedy episode of each, the median of five of one trained agent (seed {seeds}): "
        f"{', '.join(words)}. {commands}"
    )


def front_matter(hidden: str) -> str:
    return f"---\nsearch: {{exclude: true}}\nhide: [{hidden}]\n---\n"


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Apply `change` to Markdown outside of its blocks of code."""
    out = ""
    at = 0
    for code in notes.FENCE.finditer(markdown):
        out += change(markdown[at : code.start()]) + code[0]
        at = code.end()
    return out + change(markdown[at:])


def relative_url(files: Any, src_uri: str, page: Any) -> str:
    from mkdocs.utils import get_relative_url

    return get_relative_url(files.get_file_from_path(src_uri).url, page.file.url)
