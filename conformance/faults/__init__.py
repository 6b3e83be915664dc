"""The gallery of faults: implementations that are wrong in one way, by which the judge is judged."""
