"""The losses as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn._reduction import legacy_get_string

from pseudograd.loss.checks import (
    check_chunk_rows,
    check_class_k,
    check_class_k_values,
    check_factors,
    check_implementation,
    check_settings,
    check_softcap,
    check_z_loss,
    checked_k,
    python_number,
)
from pseudograd.loss.functional import tunable_cross_entropy
from pseudograd.loss.linear import tunable_linear_cross_entropy
from pseudograd.loss.modes import is_exporting
from pseudograd.loss.triton.scaled import ScaledBefore
from pseudograd.rules.paper import Sensitivity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TunableModule(nn.Module):
    """Base class of losses with a k and a reduction.

    Eager calls use k as a Python number. Compiled graphs read it from a tensor, so that changing it
    does not recompile. On CUDA devices it is a constant until its first change, because ½, 1 and 2
    have faster kernels.
    """

    reduction: str

    def __init__(self, k: Sensitivity, persistent: bool) -> None:
        super().__init__()
        self._k_tensor: Tensor | None = None
        self.k = k
        self._k_has_changed = False
        self.persistent = persistent

    @property
    def k(self) -> Sensitivity:
        """The sensitivity to large errors; it may be changed between steps."""
        return self._k

    @k.setter
    def k(self, k: Sensitivity) -> None:
        k = checked_k(k, values=True)
        self._k = k.detach() if isinstance(k, Tensor) else k  # never a Parameter of the module
        device = torch.device("cpu") if self._k_tensor is None else self._k_tensor.device
        self._k_has_changed = True
        self._k_tensor = None if isinstance(k, Tensor) else _scalar(k, device)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "k":  # `nn.Module` would register a Parameter, and not call the setter
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _k_for(self, input: Tensor) -> Sensitivity:
        """Return k as a number, or as a tensor while compiling a graph that is to serve every k."""
        # The compiler guards on numbers it has read, so it must not read `_k`.
        if torch.compiler.is_compiling() and not is_exporting():
            k = self._k_tensor
            if k is not None and (self._k_has_changed or not input.is_cuda):
                return k.squeeze(0)
        return self._k

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move k to another device with the module, but keep its precision."""
        if self._k_tensor is not None and not isinstance(self._k, Tensor):
            here = torch.empty(0, device=self._k_tensor.device)
            self._k_tensor = _scalar(self._k, fn(here).device)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.persistent:
            k = self._k
            k = k if isinstance(k, Tensor) else torch.tensor(k, dtype=torch.float64, device="cpu")
            destination[f"{prefix}k"] = k

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key = f"{prefix}k"
        if not self.persistent:
            return  # then a k in the checkpoint is an unexpected key
        if key not in state_dict:
            missing_keys.append(key)
            return
        unexpected_keys[:] = [name for name in unexpected_keys if name != key]
        k = state_dict[key]
        self.k = k.item() if isinstance(k, Tensor) and not k.dim() else k

    # `repr` shows the settings that differ from these.
    _defaults: ClassVar[dict[str, Any]] = {"persistent": False}

    def extra_repr(self) -> str:
        """Return the settings."""
        others = [
            f", {name}={getattr(self, name)!r}"
            for name, value in self._defaults.items()
            if getattr(self, name) != value
        ]
        return f"k={self.k}, reduction={self.reduction!r}{''.join(others)}"


class TunableLoss(TunableModule):
    """Base class of multi-class losses with a k."""

    class_k: Tensor | None
    _defaults: ClassVar[dict[str, Any]] = {
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "implementation": "auto",
        "persistent": False,
    }

    def __init__(
        self,
        k: Sensitivity,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        implementation: str,
        process_group: ProcessGroup | None,
        persistent: bool,
        class_k: Tensor | None,
    ) -> None:
        super().__init__(k, persistent)
        check_settings(ignore_index, reduction, label_smoothing)
        check_implementation(implementation)
        self.ignore_index = python_number(ignore_index)
        self.reduction = reduction
        self.label_smoothing = python_number(label_smoothing)
        self.implementation = implementation
        self.process_group = process_group
        if class_k is not None:
            check_factors("class_k", class_k)
            classes, device = class_k.numel(), class_k.device
            check_class_k(class_k, k, classes, device, process_group is not None)
            if not class_k.is_meta:
                check_class_k_values(class_k)
        self.register_buffer("class_k", class_k, persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move ``class_k`` as well, and keep its precision."""
        before = self.class_k
        super()._apply(fn, recurse)
        if before is not None and self.class_k is not None:
            device = self.class_k.device
            self.class_k = (
                torch.empty_like(before, device=device) if before.is_meta else before.to(device)
            )
        return self


def check_convertible(criterion: object, kind: type[nn.Module]) -> None:
    """Raise unless a loss is one of PyTorch's; a subclass that overrides ``forward`` is not."""
    if getattr(type(criterion), "forward", None) is not kind.forward:
        raise TypeError(
            f"criterion must be a torch.nn.{kind.__name__}, not {type(criterion).__name__}; to "
            "change the k of a tunable loss, set its k"
        )


def _scalar(k: float, device: torch.device) -> Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    with torch.inference_mode(False):  # a schedule may be stepped during an evaluation
        # Not 0-dimensional: the compiler would read the value and compile twice.
        return torch.tensor([float(k)], dtype=dtype, device=device)


class TunableCrossEntropyLoss(TunableLoss, nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` with one more argument, k.

    It is a subclass because some libraries use ``isinstance`` to decide whether a model returns
    logits. Positional arguments are in PyTorch's order; k is keyword-only.

    You may set ``criterion.k`` between steps. A compiled loss does not recompile, with one
    exception: on CUDA devices, k is a constant until its first change, because ½, 1 and 2 have
    faster kernels.

    Args:
        weight: A weight for each class. `tunable_cross_entropy` explains all arguments in full.
        size_average: Deprecated in PyTorch; use ``reduction``.
        ignore_index: Examples with this class index contribute nothing.
        reduce: Deprecated in PyTorch; use ``reduction``.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of each target that is spread evenly over all classes.
        k: The sensitivity to large errors, above 0.
        class_k: A sensitivity for each class, by which k is multiplied.
        implementation: "auto", "triton" or "torch".
        process_group: The ranks that share the classes.
        persistent: Whether k and ``class_k`` are in the ``state_dict``, so that a schedule of k
            survives a checkpoint.

    Example:
        >>> import torch
        >>> criterion = TunableCrossEntropyLoss(k=0.5)
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
        >>> criterion(logits, torch.tensor([0])).backward()
        >>> logits.grad
        tensor([[-0.5786,  0.3601,  0.2184]])

        You may change k between steps, pass class probabilities as targets, and weight examples:

        >>> criterion.k = 0.25
        >>> criterion(logits, torch.tensor([[0.9, 0.1, 0.0]]), torch.tensor([2.0]))
        tensor(0.5076, grad_fn=...)

    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        k: Sensitivity = 1.0,
        class_k: Tensor | None = None,
        implementation: str = "auto",
        process_group: ProcessGroup | None = None,
        persistent: bool = False,
    ) -> None:
        if size_average is not None or reduce is not None:
            reduction = legacy_get_string(size_average, reduce)
        super().__init__(
            k, ignore_index, reduction, label_smoothing, implementation, process_group, persistent,
            class_k,
        )  # fmt: skip
        check_factors("weight", weight)
        self.register_buffer("weight", weight)
        self._scaled = ScaledBefore()

    @classmethod
    def from_cross_entropy(
        cls, criterion: nn.CrossEntropyLoss, *, k: Sensitivity = 1.0, **others: Any
    ) -> Self:
        """Return a loss with the settings of an existing `torch.nn.CrossEntropyLoss`.

        Args:
            criterion: The loss to convert. Both losses then share its class weights.
            k: The sensitivity to large errors, above 0.
            **others: ``class_k``, ``implementation``, ``process_group`` and ``persistent``.

        Example:
            >>> criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
            >>> TunableCrossEntropyLoss.from_cross_entropy(criterion, k=0.5)
            TunableCrossEntropyLoss(k=0.5, reduction='mean', label_smoothing=0.1)

        """
        check_convertible(criterion, nn.CrossEntropyLoss)
        converted = cls(
            criterion.weight,
            ignore_index=criterion.ignore_index,
            reduction=criterion.reduction,
            label_smoothing=criterion.label_smoothing,
            k=k,
            **others,
        )
        return converted.train(criterion.training)

    def forward(self, input: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of logits for class indices or class probabilities."""
        return tunable_cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            k=self._k_for(input),
            class_k=self.class_k,
            sample_weight=sample_weight,
            implementation=self.implementation,
            process_group=self.process_group,
            _scaled=self._scaled,
        )


class TunableLinearCrossEntropyLoss(TunableLoss):
    """`tunable_linear_cross_entropy` as a module; the layer stays in the model.

    Args:
        k: The sensitivity to large errors, above 0; you may change it between steps, as for
            `TunableCrossEntropyLoss`.
        class_k: A sensitivity for each class, by which k is multiplied.
        class_weight: A weight for each class.
        ignore_index: Examples with this class index contribute nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of each target that is spread evenly over all classes.
        softcap: If given, logits z become softcap · tanh(z / softcap) before the loss.
        z_loss: If above 0, adds z_loss · L² to each example's loss, with L the log-sum-exp of its
            logits.
        implementation: "auto", "triton" or "torch".
        process_group: The ranks that share the classes.
        chunk_rows: The number of examples whose logits are held at a time.
        persistent: Whether k and ``class_k`` are in the ``state_dict``.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 5)
        >>> criterion = TunableLinearCrossEntropyLoss(k=0.5)
        >>> hidden, target = torch.ones(2, 8), torch.tensor([0, 3])
        >>> criterion(hidden, layer.weight, target, layer.bias).backward()
        >>> layer.weight.grad.shape
        torch.Size([5, 8])

    """

    class_weight: Tensor | None
    _defaults: ClassVar[dict[str, Any]] = {
        **TunableLoss._defaults,
        "softcap": None,
        "z_loss": 0.0,
        "chunk_rows": None,
    }

    def __init__(
        self,
        *,
        k: Sensitivity = 1.0,
        class_k: Tensor | None = None,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        implementation: str = "auto",
        process_group: ProcessGroup | None = None,
        chunk_rows: int | None = None,
        persistent: bool = False,
    ) -> None:
        super().__init__(
            k, ignore_index, reduction, label_smoothing, implementation, process_group, persistent,
            class_k,
        )  # fmt: skip
        check_chunk_rows(chunk_rows)
        check_softcap(softcap)
        check_z_loss(z_loss)
        check_factors("class_weight", class_weight)
        self.register_buffer("class_weight", class_weight)
        self.chunk_rows = python_number(chunk_rows)
        self.softcap = python_number(softcap)
        self.z_loss = python_number(z_loss)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a layer with this weight and bias for labels or probabilities."""
        return tunable_linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            k=self._k_for(hidden),
            class_k=self.class_k,
            sample_weight=sample_weight,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            implementation=self.implementation,
            process_group=self.process_group,
            chunk_rows=self.chunk_rows,
        )
