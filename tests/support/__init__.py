"""Helpers that tests share: rank scripts, models, problems, emulators; imported as
`tests.support...`.
"""
