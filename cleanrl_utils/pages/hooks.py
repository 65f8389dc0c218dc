"""Hooks that mkdocs calls while it builds the site."""

from typing import Any

from cleanrl_utils.pages.scripts import ROOT
from cleanrl_utils.pages.site import Site

CHART = ROOT / "cleanrl_utils" / "analysis" / "chart.js"
state: dict[str, Site] = {}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and files."""
    from mkdocs.structure.files import File

    site = state["site"] = Site()
    texts = dict(site.generated())
    texts |= {f"source/{script.name}.py": script.source for script in site.scripts.values()}
    texts["javascripts/chart.js"] = CHART.read_text()
    for path, text in texts.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace directives and links to lines of code."""
    site = state["site"]
    markdown = site.fill(markdown, page)
    if page.file.src_uri.startswith("rl-algorithms/"):
        markdown += "\n\n" + site.unplaced(page)
    return site.resolve(markdown, page, files)


def on_page_content(text: str, page: Any, config: Any, files: Any) -> str:
    """Insert the HTML kept from Markdown, and list functions in the contents of code pages."""
    from mkdocs.structure.toc import AnchorLink

    site = state["site"]
    if page.toc.items:
        for name, line in site.outline(page.file.src_uri):
            page.toc.items[0].children.append(AnchorLink(name, f"L{line}", 2))
    return site.put_back(text, page, files)
