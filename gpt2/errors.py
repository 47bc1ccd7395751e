"""The base of this package's errors. Imports no torch."""


class GPT2Error(Exception):
    """An error that a command reports as one line: what is wrong, where, and what to do."""


MORE_PROCESSES = "raise the limit (ulimit -u, a container's limit on processes)"
"""What to do where no process or thread can be started."""
