"""Configure the documentation site.

`make docs` builds it; every warning is an error.
"""

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from docutils import nodes

project = "polluxd"
author = "the polluxd contributors"
release = version = importlib.metadata.version("polluxd")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
autodoc_typehints = "description"
# As the code writes them: `os.environ`, and not the environment of this build.
autodoc_preserve_defaults = True
# Users make no Job and no Trial: their constructors' arguments stay out.
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
# Links of other pages may name a heading, as on GitHub.
myst_heading_anchors = 4
exclude_patterns = ["_build"]
highlight_language = "none"

# "--option" keeps its hyphens.
smartquotes = False
# A copied command leaves out the prompt and the output.
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"polluxd {version}"
# Where the project is published: Repository of [project.urls] in pyproject.toml, and nowhere else.
_project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
_repository = _project.get("urls", {}).get("Repository", "")
# The start page writes {{ repository }}. Without an address it names the repository, and links to nothing.
myst_substitutions = {"repository": f"[this repository]({_repository})" if _repository else "this repository"}
if _repository:
    icon = {"name": "Repository", "url": _repository, "html": "Repository", "class": ""}
    html_theme_options = {"footer_icons": [icon]}
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Furo's own style has no red and green for diffs.
pygments_style = "default"
pygments_dark_style = "github-dark"


# Docstrings are written as Markdown: a word between backticks is code.
default_role = "code"


def plain_docstring(app, what, name, obj, options, lines):
    """Escape what reStructuredText would read as markup."""
    if what == "module":
        lines.clear()
    lines[:] = [line.replace("|", "\\|") for line in lines]


def without_paths(app, doctree):
    """Take the two lines out of diffs that name files by their paths on the machine of this build."""
    for block in doctree.findall(nodes.literal_block):
        lines = block.astext().split("\n")
        if [line[:4] for line in lines[:2]] == ["--- ", "+++ "]:
            block.rawsource = "\n".join(lines[2:])
            block[:] = [nodes.Text(block.rawsource)]


def setup(app):
    """Write the generated pages before Sphinx looks for pages."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from docs.generate import write  # noqa: PLC0415 - imports the whole daemon

    write()
    app.connect("doctree-read", without_paths)
    app.connect("autodoc-process-docstring", plain_docstring)
