"""`python -m specdeft` is the command line."""

from specdeft.cli import main

main()
