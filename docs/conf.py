"""Sphinx configuration; ``make docs`` builds the pages."""

import shardkit

project = "shardkit"
author = "The shardkit authors"
copyright = author
release = shardkit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_member_order = "bysource"
# torch's own classes are documented elsewhere, and only their names appear here.
nitpicky = False

html_theme = "furo"
html_title = f"shardkit {release}"
