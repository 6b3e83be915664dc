"""What a run found, in every form in which it is read: terminal, JSON, Markdown, HTML."""
