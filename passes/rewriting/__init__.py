"""Find-and-replace passes: `@qsync_fx.rewrite`.

`rewrite_pass` has the decorator. `pattern` traces the user's functions, `match` finds the sites of
a pattern, and `apply_rewrite` replaces them. Start in `rewrite_pass`.
"""
