"""Predicted timeline of a training step: when each device computes, sends and waits.

`replay_plans.replay` builds a `timeline.Timeline` from plans, profiles and a cluster;
`device_profiles` loads the profiles, and `codec_costs` compares gradient codecs. Start with
`replay_plans`.

Invariant: printed and saved numbers are those of `predictor.replayer`, or sums of them.
"""
