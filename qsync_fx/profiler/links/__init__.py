"""Measurement of collectives and codecs, and of their effect on ranks that train together.

Start with `link_measurement.linked`. `collective_times` times all-reduces, `joint_steps` times
steps of all ranks. All ranks call these functions together.
"""
