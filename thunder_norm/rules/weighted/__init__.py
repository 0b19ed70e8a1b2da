"""Exponentials kept through what a program does to them, weights that are made of them, and sums by weights: weighted means written out."""
