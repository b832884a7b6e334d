"""Training a drafter: text, features, steps, evaluation in the serving path."""
