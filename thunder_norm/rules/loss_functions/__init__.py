"""Losses: regression, classification, margins, likelihoods, entropies."""
