"""The judge inside other people's programs: pure functions that need torch alone.

Nothing here imports Hypothesis, pytest, a front end or the adapters; `lint-imports` holds it.
"""
