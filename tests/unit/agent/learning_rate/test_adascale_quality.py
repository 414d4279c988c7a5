"""AdaScale keeps the small batch's quality at 32 times its size.

It takes as many examples as its gain predicts.
"""

from __future__ import annotations

from tests.unit.agent.learning_rate.digits_at_scale import predicted, train


def test_adascale_keeps_quality_where_linear_scaling_loses_it() -> None:
    small = train(0, 1, "adascale", epochs=5)
    large = train(0, 32, "adascale", epochs=5)
    linear = train(0, 32, lambda scale, noise: scale, epochs=5, passes=True)
    assert len(large.loss) < len(small.loss) / 3, "the larger batches bought nothing"
    assert large.loss[-1] < 1.3 * small.loss[-1]
    assert linear.loss[-1] > 1.5 * small.loss[-1]
    for target in (1.5, 1.0):
        reached = predicted(small, large, target)
        assert reached is not None
        assert abs(reached[0] / reached[1] - 1.0) < 0.15
