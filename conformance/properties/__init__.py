"""Properties: one module for each family of clauses, one function for each way in which a clause is
tested.
"""
