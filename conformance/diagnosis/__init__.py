"""What is wrong, in words: the defect that explains a failure, and the conditions it needs."""
