"""`make site`: the documents as pages, with a reference from docstrings, by Sphinx."""

project = "Outrider"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = "Outrider"
exclude_patterns = ["examples", "**README.md"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # docstrings mark code as Markdown does
# links to files of the repository outside docs/ stay as they are: tests/test_documents.py follows them
suppress_warnings = ["myst.xref_missing", "myst.header", "ref.python"]
