"""Known-bad attention: the textbook's formula with one defect, for a self-test to reject and a
diagnosis to name.
"""
