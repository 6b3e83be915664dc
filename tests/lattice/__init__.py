"""Right classes as published code writes attention, in combinations of its conventions."""
