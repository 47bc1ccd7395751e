"""The error of everything that a person can mend. Imports nothing."""


class BenchError(Exception):
    """A command cannot do what was asked; the message says where, what, and what to do."""
