"""``python -m paper``, from the root of a clone."""

from paper.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
