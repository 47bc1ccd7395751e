"""The command `gpt2`, also as python -m gpt2.cli."""


def main() -> None:
    """Entry point of the console script; Ctrl-C while it is being loaded ends it without a traceback."""
    try:
        from gpt2.signals import heed_every_interrupt

        heed_every_interrupt()
        from gpt2.cli import main as command

        command.main()
    except KeyboardInterrupt:  # before a command has begun, which heeds it
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
