"""From a name, a file or an entry point to an implementation, or to what there is instead."""
