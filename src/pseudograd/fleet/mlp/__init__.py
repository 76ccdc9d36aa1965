"""Fully connected networks, stacked so that one batched product serves them all."""
