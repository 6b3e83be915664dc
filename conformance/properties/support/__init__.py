"""What the properties of several families share, and no clause of its own."""
