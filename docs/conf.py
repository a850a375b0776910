"""Sphinx configuration."""

import os
from pathlib import Path

os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "examples")  # of the kernel that runs the pages

project = "emtau_dask"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}  # autosummary writes pages as the first
exclude_patterns = ["_build"]
templates_path = ["_templates"]

nitpicky = True
default_role = "py:obj"  # docstrings name things in single backticks

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_in_temp = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "emtau_dask"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["emtau.css"]
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "show_prev_next": False,
    "footer_start": [],
    "footer_end": [],
}
html_sidebars = {"index": [], "install": [], "tutorial": [], "gallery": []}


def link_by_last_part(app, env, node, contnode):
    """Resolve `GaussianMixture.fit` and the like, which docstrings name without their module."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    ending = f".{node['reftarget']}"
    found = {name for name, entry in domain.objects.items() if name.endswith(ending) and not entry.aliased}
    if len(found) != 1:
        return None
    docname = node.get("refdoc")
    return domain.resolve_xref(env, docname, app.builder, "obj", found.pop(), node, contnode)


def setup(app):
    """Connect what resolves short names."""
    app.connect("missing-reference", link_by_last_part)
