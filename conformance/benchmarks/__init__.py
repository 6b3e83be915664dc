"""Benchmarks: time and peak memory of conforming implementations, compared in interleaved rounds."""
