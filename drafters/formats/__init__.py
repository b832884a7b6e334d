"""Checkpoint layouts of other projects (none yet: the z-lab layout is in ``drafters.saving``)."""
