"""Tables and figures of QSync, AQGB and DUO, from trainings that really run; see docs/experiments.md."""
