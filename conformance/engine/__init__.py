"""How a verdict is reached: the search for a failure, what blocks it, and what its cases are worth."""
