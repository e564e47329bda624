"""Passes on each graph after autograd; importing them imports Inductor, which happens when something is compiled."""
