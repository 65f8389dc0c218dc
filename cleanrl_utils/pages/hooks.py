"""What mkdocs calls while it builds the site."""

from typing import Any

from cleanrl_utils.pages.scripts import ROOT
from cleanrl_utils.pages.site import Site

CHART = ROOT / "cleanrl_utils" / "analysis" / "chart.js"
state: dict[str, Site] = {}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files that are made from the code."""
    from mkdocs.structure.files import File

    site = state["site"] = Site()
    texts = dict(site.generated())
    texts |= {f"source/{script.name}.py": script.source for script in site.scripts.values()}
    texts["javascripts/chart.js"] = CHART.read_text()
    for path, text in texts.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in directives and links to lines."""
    site = state["site"]
    markdown = site.fill(markdown, page)
    if page.file.src_uri.startswith("rl-algorithms/"):
        markdown += "\n\n" + site.unplaced(page)
    return site.resolve(markdown, page, files)


def on_page_content(text: str, page: Any, config: Any, files: Any) -> str:
    """Put in the HTML that Markdown left alone; a page of code gets its functions as contents."""
    from mkdocs.structure.toc import AnchorLink

    site = state["site"]
    if page.toc.items:
        for name, line in site.outline(page.file.src_uri):
            page.toc.items[0].children.append(AnchorLink(name, f"L{line}", 2))
    return site.put_back(text, page, files)
