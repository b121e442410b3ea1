"""Architectures, the training loop, pruning and fake-quantisation."""
