"""What a plan makes of a training step before it runs: when each device computes, sends and waits.

`timeline` is the value that users get, `replaying` makes it from plans, profiles and clusters.

Invariant: what is printed and written is what `predictor.replay` found; nothing is reckoned here but sums.
"""
