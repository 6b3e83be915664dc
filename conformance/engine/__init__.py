"""How a verdict is reached: searches for failures, what blocks them, and processes that judge."""
