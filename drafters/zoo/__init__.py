"""Trained drafters that ship with the package, one folder each."""
