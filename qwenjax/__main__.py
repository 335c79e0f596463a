"""`python -m qwenjax`."""

from qwenjax.cli import main

if __name__ == "__main__":
    main()
