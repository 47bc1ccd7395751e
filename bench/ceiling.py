"""Entry point of bench.run.ceiling, by the name that committed records give in their commands."""

from bench.process.worker_side import leave
from bench.run.ceiling import main

if __name__ == "__main__":
    leave(main())
