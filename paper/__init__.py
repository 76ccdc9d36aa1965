"""The paper as code: its rows, run and judged claim by claim; its toy example and its theory."""

PROGRAM = "python -m paper"
