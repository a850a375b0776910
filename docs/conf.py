"""Sphinx configuration."""

project = "emtau_dask"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False
html_theme = "alabaster"
html_theme_options = {
    "description": "Gaussian mixtures on data larger than memory",
    "page_width": "1240px",
    "body_max_width": "1000px",
}
