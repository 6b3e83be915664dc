"""Cases: small descriptions of a problem, from which the tensors are made, and how cases are
chosen.
"""
