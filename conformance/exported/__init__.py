"""Cases as files that other languages read: inputs, the expected results, and their bounds."""
