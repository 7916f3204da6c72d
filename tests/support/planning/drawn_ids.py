"""Hypothesis strategies of operator ids."""

from __future__ import annotations

from hypothesis import strategies as st

from qsync_fx.plan.operator_id import OpId

# any_name: all characters of a ModuleDict key; plain_name: few, so that patterns match.
any_name = st.text(st.characters(exclude_characters="."), min_size=1, max_size=6)
plain_name = st.text("ab01_", min_size=1, max_size=4)
paths = st.lists(any_name, min_size=1, max_size=5).map(".".join)
indices = st.one_of(st.integers(0, 12), st.integers(0, 999_999_999))
inside = st.builds(OpId, paths, any_name, indices)
outside = st.builds(OpId, st.just(""), any_name, indices, st.one_of(st.just(""), paths))
op_ids = st.one_of(inside, outside)
