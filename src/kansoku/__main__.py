"""Run the command line with ``python -m kansoku``."""

from kansoku.cli import main

if __name__ == "__main__":
    main()
