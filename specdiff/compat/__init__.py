"""Which architectures of the installed transformers can be served: tiny models of all, and the table of results."""
