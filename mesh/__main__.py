"""`python -m mesh` is the command line `mesh`, for where the console script is not on the path."""

from mesh.cli.main import main

if __name__ == "__main__":
    main()
