"""Differential equations with exact solutions, solved by least squares and by first-order baselines."""
