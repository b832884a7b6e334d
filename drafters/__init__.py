"""Drafters: models, checkpoint formats, training and the zoo."""
