"""Sphinx configuration; ``make docs`` builds the pages."""

from __future__ import annotations

import json

from docutils.nodes import document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

import shardkit

project = "shardkit"
author = "The shardkit authors"
copyright = author
release = shardkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".ipynb": "notebook"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
highlight_language = "none"  # what a terminal prints is no Python

autodoc_typehints = "description"
autodoc_member_order = "bysource"
# torch's own classes are documented elsewhere, and only their names appear here.
nitpicky = False

html_theme = "furo"
html_title = f"shardkit {release}"


class Notebook(MystParser):
    """A notebook as a page: its text, its code, and below it what the code printed."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: document) -> None:
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            source = "".join(cell["source"])
            parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
            printed = "".join("".join(output.get("text", [])) for output in cell.get("outputs", []))
            if printed:
                parts.append(f"```text\n{printed}```")
        super().parse("\n\n".join(parts), document)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_source_parser(Notebook)
