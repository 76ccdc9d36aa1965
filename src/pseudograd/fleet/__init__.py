"""Many models trained at once on one device."""

from pseudograd.fleet.fleet import Fleet
from pseudograd.fleet.network import Network
from pseudograd.fleet.splits import Parts, parts
from pseudograd.fleet.trial import Outcome, Split, Trial

__all__ = ["Fleet", "Network", "Outcome", "Parts", "Split", "Trial", "parts"]
