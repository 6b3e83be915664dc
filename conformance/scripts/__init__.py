"""Failures as programs: a script that needs torch and the author's own file alone."""
