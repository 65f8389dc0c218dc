"""Build the parts of the documentation that come from the code and from benchmark/results.

    make docs                                       # the site; mkdocs calls the on_... functions
    python -m cleanrl_utils.docs                    # the README's table and curves
    python -m cleanrl_utils.docs --gif runs/NAME    # video of a saved model, docs/assets/films
    python -m cleanrl_utils.docs --gif runs/A runs/B    # videos, and both in docs/assets/agents.gif

On a page, `{{ flags ppo.py }}`, `{{ metrics }}`, `{{ results }}` and others (`Site.make_...` in
cleanrl_utils/pages/site.py) are filled in; without a script's name they are about all scripts of
the page. A link like `[text](src:ppo.py#"code")` leads to the one line of cleanrl/ppo.py that holds
this code; the paragraph is shown there as a note. A link to code that is not there, or a tag that
get-started/metrics.md does not explain, is a warning: it ends `mkdocs build --strict`.
"""

from dataclasses import dataclass

from cleanrl_utils.pages.hooks import on_files, on_page_content, on_page_markdown
from cleanrl_utils.pages.scripts import ROOT

__all__ = ["on_files", "on_page_content", "on_page_markdown"]  # mkdocs finds them by these names


@dataclass
class DocsArgs:
    gif: tuple[str, ...] = ()
    """folders of runs, or models of the zoo: record videos of them; unset: write the README's table
    and curves"""


def main(args: DocsArgs) -> None:
    from cleanrl_utils.pages import films, readme

    if args.gif:
        for path in films.make_films(list(args.gif)):
            print(path.relative_to(ROOT))
        return
    path = ROOT / "README.md"
    path.write_text(readme.fill_readme(path.read_text()))
    readme.draw_curves(ROOT / "docs" / "assets" / "curves.png")
    print("README.md and docs/assets/curves.png are written")


if __name__ == "__main__":
    from cleanrl_utils.running.settings import parse_command

    main(parse_command(DocsArgs))
