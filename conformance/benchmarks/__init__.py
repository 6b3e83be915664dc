"""Benchmarks: time and peak memory of conforming implementations, in interleaved rounds."""
