"""Predicted timeline of a training step: when each device computes, sends and waits.

`replay_plans.replay` builds a `timeline.Timeline` from plans, profiles and a cluster; start there.
`replay_plans.paying` compares gradient codecs, and `device_profiles` loads the profiles.
"""
