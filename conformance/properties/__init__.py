"""Properties: a module for each family of clauses, a function for each way to test a clause."""
