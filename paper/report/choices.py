"""What the paper leaves open and what is done otherwise, each with the reason."""

from __future__ import annotations

from paper.report.document import Bullets, Part, Text
from pseudograd.search import Protocol
from pseudograd.search.protocol import CLIP


def the_choices(protocol: Protocol) -> Part:
    """Tell what the paper leaves open and what is done otherwise.

    Args:
        protocol: Whose sizes are named; all rows have the same.

    Example:
        >>> from pseudograd.fleet import MLPRecipe
        >>> the_choices(Protocol(MLPRecipe("mnist", (400,)))).title
        'Choices and deviations'

    """
    trial, sweep = protocol.recipe, protocol.sweep
    return Part("Choices and deviations", [
        Text(
            "What the paper leaves open, and what is done otherwise, each with the reason. The k, "
            "the repetitions (10 for MNIST, 7 for the rest), the batches of "
            f"{trial.batch_size}, the patience of {trial.patience} epochs and the extension of "
            "rates are the paper’s."
        ),
        Bullets([
            "**Activation** (open): ReLU. In first measurements on CIFAR-10, tanh and sigmoid were "
            "3 to 4 points of test error off the paper at k = 1, and ReLU was near it. Four rows "
            "are run with tanh as well.",
            "**Form of the momentum** (open): v ← μ v + g, w ← w − η v, as in `torch.optim.SGD`. "
            "With a constant rate this is the classical form of Sutskever et al. (2013), whom the "
            "paper cites; it is not Nesterov’s.",
            "**Mean or sum over the batch** (open): the mean, also for the last, smaller batch of "
            "an epoch. With a sum the same steps would have rates 128 times smaller, and the "
            "clipping another meaning.",
            f"**Gradient clipping**: the norm over all parameters, {CLIP:g} at most, before the "
            "momentum, with several hidden layers only. That the norm is over all parameters is "
            "our reading.",
            "**Initial weights**: Glorot’s uniform distribution in hidden layers (the paper names "
            "the scheme, not the distribution); biases and softmax layer are 0, as in the paper.",
            "**Initial rate** (open): the paper speaks of preliminary experiments. Here it is the "
            f"best of {len(sweep)} rates from 4⁻⁶ to 4, a factor of 4 apart, at k = 1 after "
            "5 epochs, by the error on the early-stopping part of the first repetition: quick, and "
            "the same for every row. Networks that would be better in the end at far lower rates "
            "are behind after 5 epochs, so a search may begin in the valley of the higher rates "
            "and, by the paper’s rule, end there (see “Which learning rates are selected?”).",
            "**Extension of rates**: rates are added while the best one, of equals the smallest, "
            "is at an end. Where nothing was learned at any rate, lower ones are added. At "
            f"most {protocol.most_extensions} are added for each k, so that every search ends; a k "
            "that would need more is marked by ‡.",
            "**Ties** (open): of equal validation errors the k nearest 1 is taken, since k should "
            "only be changed for a reason, then the smaller rate. Of epochs with equal errors on "
            "the early-stopping part the first counts.",
            "**What a repetition permutes** (open): the examples are cut into five parts once, and "
            "the roles of the parts go round; each repetition has initial weights and orders of "
            "its own. They are the same for all k and rates, so that differences are paired.",
            "**Equal parts**: up to four examples (two of SVHN) have no role in cross-validation; "
            "in the final training they are trained on.",
            "**MNIST’s scaling**: the paper says [−1, 1] for all sets. Its final rates for MNIST "
            "(0.1 to 10) fit [0, 1] better: in first measurements of 1x400 in [−1, 1], training "
            "diverged above a rate of 0.2. Both are run, both are shown; “Which scaling of MNIST "
            "fits the paper?” compares them.",
            "**Which models the tables show**: the paper says, those retrained with one fifth for "
            "early stopping. Some of its figures lie nearer to models trained on three fifths, as "
            "“The tables” counts. Both are shown; claims are judged by the retrained ones.",
            f"**Number of retrainings**: {protocol.retrainings} for each of the two k, where the "
            "paper has one, each stopped early by another fifth and with weights and orders of its "
            "own: without a spread, a difference cannot be told from chance.",
            f"**Limit of epochs**: {trial.max_epochs:,}, where the paper names none, so that every "
            "training ends; a final network that ends by it is named below its table.",
            "**Divergence** (open): a network whose weights or whose cross-entropy are not finite, "
            "or whose weights exceed 10,000 while it does no better than naming the most frequent "
            "class, is stopped, to save time; its best epoch counts.",
            "**Precision**: on a GPU, products are of float16 numbers, which have the mantissa of "
            "TF32 and a smaller range, to which errors are scaled, summed in float32; weights, "
            "momentum and sums are float32. That is the fastest, and changed the errors of two "
            "rows of MNIST, at k = 1/2 and k = 1, by less than seeds do "
            "(`benchmarks/results/precision.csv`); other k and sets were not compared. On a CPU "
            "all is float32.",
            "**SVHN**: where it is said to be re-cropped (see “What was run”), the digits were cut "
            "again from the official pictures of whole numbers. All 1,083 official digits at hand "
            "are identical, but some pixels of others may differ by 1.",
            "**Rows**: the 67 that the paper prints. The 27 that its source has as comments can be "
            "run by `python -m paper run unprinted`.",
        ]),
    ])  # fmt: skip
