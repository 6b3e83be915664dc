"""The site, for Sphinx, which reads the sources that `python -m generated` has written."""

project = "mha-conformance"
html_title = "mha-conformance"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["extra"]
myst_heading_anchors = 4
highlight_language = "none"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
