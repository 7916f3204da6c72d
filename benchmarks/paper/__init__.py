"""Tables and figures of QSync, AQGB and DUO, reproduced by training; see docs/experiments.md."""
