"""``python -m beyond``, from the root of a clone."""

from beyond.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
