"""A mkdocs hook: adds README and CONTRIBUTING to the site and adapts their links."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}  # path in the repository: on the site


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add README as the first page and CONTRIBUTING as the last."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links for the site, whose root is `docs/` with README and CONTRIBUTING in it."""
    if page.file.src_uri in PAGES.values():
        markdown = re.sub(r"\]\(docs/", "](", markdown)
    for source, target in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{source}", f"]({target}", markdown)
    return markdown
