"""The shares of keys and sinks keep their digits, however small they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.common.sinks import share_of_keys, share_of_sinks

_LEADS = np.linspace(-40.0, 40.0, 401)  # the log-sum-exp of the keys; that of the one sink is 0
_SINK = jnp.zeros((1, 1))


def _of_leads(share, leads):
    return share(jnp.asarray(leads, jnp.float32)[None, None], _SINK)[0, 0]


@pytest.mark.parametrize(("share", "sign"), [(share_of_keys, 1.0), (share_of_sinks, -1.0)])
def test_a_share_and_its_slope_are_exact_to_a_few_roundings(share, sign):
    leads = np.asarray(_LEADS, np.float32).astype(np.float64)
    exact = 1.0 / (1.0 + np.exp(-sign * leads))
    slope = sign / (2.0 * np.cosh(leads / 2.0)) ** 2
    np.testing.assert_allclose(_of_leads(share, _LEADS), exact, rtol=1e-6)
    tangents = jax.vmap(jax.grad(lambda x: share(x[None, None, None], _SINK)[0, 0, 0]))(
        jnp.asarray(_LEADS, jnp.float32)
    )
    np.testing.assert_allclose(tangents, slope, rtol=1e-6)


def test_sinks_of_minus_infinity_leave_all_to_the_keys():
    lse = jnp.asarray([[[-50.0, 0.0, 50.0]]])
    sinks = jnp.full((1, 2), -jnp.inf)
    assert (share_of_keys(lse, sinks) == 1.0).all()
    assert (share_of_sinks(lse, sinks) == 0.0).all()
    d_lse, d_sinks = jax.grad(lambda *x: share_of_keys(*x).sum(), (0, 1))(lse, sinks)
    assert (d_lse == 0.0).all()
    assert (d_sinks == 0.0).all()


def test_a_row_without_keys_has_finite_shares():
    lse = jnp.full((1, 1, 2), -jnp.inf)
    for share in (share_of_keys, share_of_sinks):
        value, gradient = jax.value_and_grad(lambda x, share=share: share(x, _SINK).sum())(lse)
        assert jnp.isfinite(value)
        assert (gradient == 0.0).all()
