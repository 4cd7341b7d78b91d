"""The command line as ``python -m lowbit``."""

from lowbit.cli import main

main()
