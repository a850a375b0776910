"""Sphinx configuration."""

project = "emtau_dask"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}
exclude_patterns = ["_build"]
templates_path = ["_templates"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "auto"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_in_temp = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autosummary_imported_members = False
numpydoc_show_class_members = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

nitpicky = True

html_theme = "pydata_sphinx_theme"
html_title = "emtau_dask"
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_prev_next": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
}
html_show_sourcelink = False

default_role = "py:obj"
