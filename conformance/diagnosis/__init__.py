"""What is wrong, in words: the defect that explains a failure, the conditions that it needs, and
the step that it is in.
"""
