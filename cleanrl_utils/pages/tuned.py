"""The page of tuned settings: the commands of tuned.toml, and the scores of their runs."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from cleanrl_utils.analysis import grouping, tables
from cleanrl_utils.pages.results import Group, command_html, indent
from cleanrl_utils.running.tuned import as_words, read_tuned


@dataclass
class Entry:
    """Tuned settings of a script for an environment."""

    script: str
    env_id: str
    settings: dict[str, Any]

    @property
    def command(self) -> str:
        return f"python cleanrl/{self.script}.py --env-id {self.env_id} --tuned"

    @property
    def flags(self) -> str:
        words = []
        for name, value in self.settings.items():
            words += as_words("--" + name.replace("_", "-"), value)
        return " ".join(words)

    def made(self, fact: dict[str, Any]) -> bool:
        """Whether a run has these settings."""
        found = tables.fact_settings(fact)
        wanted = {name: grouping.as_text(value) for name, value in self.settings.items()}
        return all(found.get(name) == value for name, value in wanted.items())


def entries() -> list[Entry]:
    """All entries, by environment."""
    found = []
    for script, by_env_id in read_tuned().items():
        for env_id, settings in by_env_id.items():
            found.append(Entry(script, env_id, dict(settings)))
    return sorted(found, key=lambda entry: (entry.env_id, entry.script))


def entry_groups(entry: Entry, groups: list[Group]) -> list[Group]:
    """The results of an entry: its groups, each with the runs that have its settings."""
    found = []
    for group in groups:
        if (group.script, group.env_id) != (entry.script, entry.env_id):
            continue
        runs = [run for run in group.runs if entry.made(run)]
        if runs:
            found.append(dataclasses.replace(group, runs=runs))
    return found


def default_score(entry: Entry, groups: list[Group]) -> str:
    """The score of the default settings, from the longest runs of the script's own name."""
    defaults = []
    for group in groups:
        of_entry = (group.name, group.env_id) == (entry.script, entry.env_id)
        if of_entry and not any(entry.made(run) for run in group.runs):
            defaults.append(group)
    if not defaults:
        return "–"
    longest = max(defaults, key=lambda group: group.steps)
    return f"{longest.score()} ({longest.steps:,} steps)"


def tuned_table(groups: list[Group]) -> str:
    """One row per entry: command and scores."""
    header = ["command", "return", "best", "seeds", "steps", "minutes", "with the defaults"]
    lines = [f"| {' | '.join(header)} |", "|-" * len(header) + "|"]
    for entry in entries():
        for group in entry_groups(entry, groups):
            cells = [command_html(entry.command.removeprefix("python cleanrl/")), group.score()]
            cells += [group.best(), str(group.seeds), f"{group.steps:,}", group.minutes()]
            lines.append(f"| {' | '.join([*cells, default_score(entry, groups)])} |")
    return "\n".join(lines)


def settings_table() -> str:
    """The flags that each entry sets, collapsed."""
    lines = ["| script | environment | flags |", "|-|-|-|"]
    for entry in entries():
        names = f"`{entry.script}.py` | `{entry.env_id}`"
        lines.append(f"| {names} | {command_html(entry.flags)} |")
    return '??? note "The flags that `--tuned` sets"\n\n' + indent("\n".join(lines))
