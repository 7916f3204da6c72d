"""Hypothesis strategies of plans, operator ids and patterns."""

from __future__ import annotations

from hypothesis import strategies as st

from qsync_fx.formats import FORMATS
from qsync_fx.plan import Plan
from qsync_fx.plan.operator_id import OpId

names = st.text(st.characters(exclude_characters="."), min_size=1, max_size=6)
op_ids = st.one_of(
    st.builds(
        OpId, st.lists(names, min_size=1, max_size=3).map(".".join), names, st.integers(0, 20)
    ),
    st.builds(OpId, st.just(""), names, st.integers(0, 3), st.one_of(st.just(""), names)),
)
precisions = st.sampled_from(sorted(FORMATS))
patterns = st.sampled_from(["**", "*", "a.*", "a.**.b", "*/linear", "/relu@*#1", "é.%2F"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plans = st.builds(
    Plan,
    st.one_of(st.none(), precisions),
    st.lists(st.tuples(patterns, precisions), max_size=4),
    st.dictionaries(op_ids, precisions, max_size=6),
    st.dictionaries(texts, texts, max_size=2),
)
