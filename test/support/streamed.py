"""Models that are larger than the device, drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from sglang_hc.policy.streamed_pass import StreamedModel


@st.composite
def streamed_models(draw: st.DrawFn, act: st.SearchStrategy[float] | None = None) -> StreamedModel:
    """Few layers of any proportions. act: bytes of a hidden state; those of K and V are 2."""
    times = st.floats(0.01, 10.0)
    layers, weights = draw(st.integers(1, 9)), draw(st.floats(10.0, 1e4))
    state = draw(act if act is not None else st.sampled_from([0.5, 1.0, 2.0, 8.0]))
    link = draw(times)
    whole = layers * weights
    return StreamedModel(
        layers=layers,
        weights=weights,
        kv=2.0,
        act=state,
        load_w=weights / link,
        load_kv=2.0 / link,
        load_act=state / link,
        kv_gen=draw(times),
        read_w=draw(times),
        read_kv=draw(st.floats(0.0, 0.1)),
        per_new=draw(times),
        per_pair=draw(st.floats(0.0, 0.01)),
        per_round=draw(st.floats(0.0, 1.0)),
        outside=draw(st.floats(0.0, 10.0)),
        active=draw(st.sampled_from([1.0, 0.1])),
        host=whole * draw(st.floats(0.5, 4.0)) + draw(st.floats(0.0, 1e5)),
        device=whole * draw(st.floats(0.1, 1.5)) + draw(st.floats(0.0, 1e5)),
    )
