"""Which architectures of the installed transformers can be served: tiny models of all of them, and the table of results."""
