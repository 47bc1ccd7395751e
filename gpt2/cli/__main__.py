"""python -m gpt2.cli: the command `gpt2`."""

from gpt2.cli.main import main

main()
