"""From a name, a file or an entry point to an implementation, and what to say where there is none."""
