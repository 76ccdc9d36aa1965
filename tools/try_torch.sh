#!/bin/sh
# Run the tests of the loss with another version of PyTorch, in its own virtual environment:
#
#     tools/try_torch.sh 2.15.0 [pytest options]
#
# NUMPY is the version of NumPy, such as "<2.4" (by default the newest), and TRY_TORCH_FOLDER the
# folder of the environments (by default .venv/torch).
set -eu
version=${1:?give a version of PyTorch, such as 2.15.0}
shift
cd "$(dirname "$0")/.."
folder=${TRY_TORCH_FOLDER:-.venv/torch}/$version
if [ ! -e "$folder/.installed" ]; then
    ${PYTHON:-python3} -m venv "$folder"
    PIP_CONSTRAINT="" "$folder/bin/pip" install --quiet \
        "torch==$version" "numpy${NUMPY:-}" pytest mpmath hypothesis onnxscript onnxruntime skorch
    touch "$folder/.installed"
fi
# shellcheck disable=SC2046
PYTHONPATH=src:. OMP_WAIT_POLICY=passive exec "$folder/bin/python" -m pytest -p no:cacheprovider -q \
    $(printf 'tests/test_%s.py ' adoption binary_loss class_k cpu_kernels drop_in errors linear_loss \
        loss_contract loss_kernels paper_rule parallel_loss properties pytorch_cases \
        pytorch_samples reweighted rules sample_weights schedules target_gradient transforms) "$@"
