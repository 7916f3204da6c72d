"""AQGB (X. Liu et al., 2022): adaptive bit widths that follow the link bandwidth during a step."""
