"""`python -m abrun`: the command line."""

from abrun.cli import main

if __name__ == "__main__":
    main()
