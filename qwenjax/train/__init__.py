"""Training: the losses, one optax step as a single jitted function, data without state, and a loop that can resume.

`settings` needs only the standard library; JAX comes with the others.
"""
