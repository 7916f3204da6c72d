"""Passes that find and replace: what users write with `@qsync_fx.rewrite`."""
