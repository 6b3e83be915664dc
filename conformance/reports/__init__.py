"""Reports of a run: in the terminal, as GitHub annotations, and as JSON, Markdown or HTML."""
