"""Cases: small descriptions of a problem, drawn by Hypothesis, from which the tensors are made."""
