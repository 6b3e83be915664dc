"""The process that judged code runs in: torch's functions and settings, and what is beside them."""
