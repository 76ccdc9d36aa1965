#!/usr/bin/env bash
# Install a wheel in a clean environment, alone and then with its extras, and smoke-test each.
# Usage: try_wheel.sh WHEEL; PYTHON is the interpreter (python3).
set -euo pipefail
wheel=$(realpath "$1")
smoke=$(realpath "$(dirname "$0")/smoke.py")
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
unset PYTHONPATH  # test only the wheel
"${PYTHON:-python3}" -m venv "$here/venv"
cd "$here"
venv/bin/pip install --quiet pip
for extras in "" "[tune]" "[all]"; do
    venv/bin/pip install --quiet "$wheel$extras"
    venv/bin/python "$smoke" "${extras:-core}"
done
