"""Time and memory, of what conforms: `mha bench`."""
