"""``python -m lowbit``: the command without its installed script."""

from lowbit.cli import main

main()
