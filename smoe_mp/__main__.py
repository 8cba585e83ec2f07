"""`python -m smoe_mp`: the command line."""

from smoe_mp.cli import main

if __name__ == "__main__":
    main()
