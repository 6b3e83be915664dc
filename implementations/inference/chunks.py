"""The chunks of places that a call may ask for, beyond which no query sees a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mha.implementations.inference.candidate import Candidate
from mha.implementations.inference.score_options import (
    ScoreOption,
    aligned,
    possible_alignments,
)
from mha.spec import Scores

# Chunks whose ends lie within the keys of trial runs; the first one is no window of any kind.
TRIED = (3, 2, 1)
# A parameter of this name is more often of tiles, which change nothing.
OF_TILES = "chunk_size"


class ChunkOption(ScoreOption):
    """How many places a chunk has."""

    name = "chunk"

    def readings(self, candidate: Candidate) -> Iterator[Scores]:
        """Yield chunks that are counted from each end, where nothing says it."""
        for alignment in possible_alignments(candidate):
            yield replace(candidate.claimed("scores"), chunk=True, alignment=alignment)

    def values(self, scores: Scores) -> tuple[int, ...]:
        """Return the numbers of places."""
        del scores
        return TRIED

    def words(self, scores: Scores) -> str:
        """Return what a reading says."""
        return f"a query sees the keys of its own chunk of so many places{aligned(scores)}"

    def usual(self, candidate: Candidate, readings: Sequence[Scores]) -> Sequence[Scores]:
        """Return the first reading, unless the name may be that of a tile."""
        return [] if OF_TILES in self.names(candidate) else readings[:1]

    def flags(self, candidate: Candidate, scores: Scores, *, ignored: bool) -> tuple[bool, ...]:
        """Return both flags, where there is one, and chunks are taken without it."""
        del ignored
        return self.flags_taken(candidate, scores)


CHUNK = ChunkOption()
