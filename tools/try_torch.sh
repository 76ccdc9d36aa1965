#!/bin/sh
# Run the tests of the loss with another PyTorch, in a virtual environment of its own:
#
#     tools/try_torch.sh 2.7.0 [options of pytest]
#
# TRY_TORCH_FOLDER says where the environments go (by default .venv/torch).
set -eu
version=${1:?which version of PyTorch, such as 2.7.0}
shift
cd "$(dirname "$0")/.."
folder=${TRY_TORCH_FOLDER:-.venv/torch}/$version
if [ ! -e "$folder/.installed" ]; then
    ${PYTHON:-python3} -m venv "$folder"
    PIP_CONSTRAINT="" "$folder/bin/pip" install --quiet \
        "torch==$version" numpy pytest mpmath hypothesis onnxscript onnxruntime skorch
    touch "$folder/.installed"
fi
PYTHONPATH=src:. OMP_WAIT_POLICY=passive exec "$folder/bin/python" -m pytest -p no:cacheprovider -q \
    tests/test_drop_in.py tests/test_errors.py tests/test_linear_loss.py tests/test_loss_contract.py \
    tests/test_paper_rule.py tests/test_properties.py tests/test_pytorch_samples.py \
    tests/test_reweighted.py tests/test_rules.py tests/test_target_gradient.py \
    tests/test_transforms.py "$@"
