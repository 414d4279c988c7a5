"""Configure the documentation site.

`make docs` builds it; every warning is an error.
"""

import importlib.metadata
import sys
from pathlib import Path

project = "polluxd"
author = "the polluxd contributors"
release = version = importlib.metadata.version("polluxd")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "description"
myst_enable_extensions = ["colon_fence", "deflist"]
# Links of other pages may name a heading, as on GitHub.
myst_heading_anchors = 4
exclude_patterns = ["_build"]
highlight_language = "none"

html_theme = "furo"
html_title = "polluxd"


# Docstrings are written as Markdown: a word between backticks is code.
default_role = "code"


def plain_docstring(app, what, name, obj, options, lines):
    """Escape what reStructuredText would read as markup."""
    if what == "module":
        lines.clear()
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app):
    """Write the generated pages before Sphinx looks for pages."""
    sys.path.insert(0, str(Path(__file__).parent))
    from generate import write  # noqa: PLC0415 - imports the whole daemon

    write()
    app.connect("autodoc-process-docstring", plain_docstring)
