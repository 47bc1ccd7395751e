"""python -m bench.cli: the command `bench`."""

from bench.cli.main import main

main()
