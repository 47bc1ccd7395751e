"""The command `bench`, also as python -m bench.cli."""


def main() -> None:
    """Entry point of the console script; Ctrl-C while it is being loaded ends it without a traceback."""
    try:
        from bench.cli import main as command
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    command.main()


if __name__ == "__main__":
    main()
