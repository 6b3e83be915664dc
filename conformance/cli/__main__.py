"""`python -m mha.conformance.cli`: the command `mha`."""

from mha.conformance.cli import main

if __name__ == "__main__":
    main()
