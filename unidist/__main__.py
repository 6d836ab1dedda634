"""`python -m unidist` is the command line `unidist`."""

from unidist.cli.main import main

if __name__ == "__main__":
    main()
