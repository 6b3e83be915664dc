"""Explanations of incorrect answers: the textbook's formula with one plain defect, to compare an answer with."""
