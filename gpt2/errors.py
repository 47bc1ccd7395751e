"""The base of this package's errors, and words for limits that any part may meet. Imports no torch."""

import errno
import os

MORE_PROCESSES = "raise the limit (ulimit -u, a container's limit on processes)"
"""What to do where no process or thread can be started."""


class GPT2Error(Exception):
    """An error that a command reports as one line: what is wrong, where, and what to do."""


def limit_met(error: BaseException) -> str | None:
    """Say which limit on processes, threads or open files an error tells of, and what to do; else None."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}; raise the limit (ulimit -n)"
    if any(sign in str(error) for sign in ("can't start new thread", os.strerror(errno.EAGAIN))):
        return f"no process or thread could be started; {MORE_PROCESSES}"
    return None
