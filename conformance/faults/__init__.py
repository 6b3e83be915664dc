"""Faulty implementations, each with the clauses that must catch it: the self-test of the suite."""
