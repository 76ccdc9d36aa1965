"""The studies that the paper left to future work: seven questions, planned in PLAN.md."""

PROGRAM = "python -m beyond"
