/// Recursive least squares with exponential forgetting, for a linear model of `N` features.
///
/// The textbook recursion (Ljung, *System Identification*, 11.2), in `f64` and in fixed order, so that the same
/// observations give the same estimate everywhere.
#[derive(Debug, Clone)]
pub(crate) struct LeastSquares<const N: usize> {
    estimate: [f64; N],
    covariance: [[f64; N]; N],
    /// Variances of the prior: no direction is ever less certain than at the start.
    most: [f64; N],
    forgetting: f64,
}

impl<const N: usize> LeastSquares<N> {
    /// Starts from a prior estimate. `trust` is the standard deviation, relative to each prior value, that the
    /// prior is believed to have; `forgetting` in (0, 1] is how much an observation weighs one observation later.
    pub fn new(prior: [f64; N], trust: f64, forgetting: f64) -> Self {
        let mut covariance = [[0.0; N]; N];
        for (i, value) in prior.iter().enumerate() {
            covariance[i][i] = (value.abs().max(1e-9) * trust).powi(2);
        }
        let most = std::array::from_fn(|i| covariance[i][i]);
        Self { estimate: prior, covariance, most, forgetting }
    }

    /// Takes one observation with the given noise variance.
    pub fn observe(&mut self, features: &[f64; N], value: f64, noise: f64) {
        let gained: [f64; N] =
            std::array::from_fn(|i| (0..N).map(|j| self.covariance[i][j] * features[j]).sum::<f64>());
        let spread = noise * self.forgetting + (0..N).map(|i| features[i] * gained[i]).sum::<f64>();
        if !(spread.is_finite() && spread > 0.0 && value.is_finite()) {
            return;
        }
        let error = value - self.raw(features);
        for i in 0..N {
            self.estimate[i] += gained[i] / spread * error;
        }
        for i in 0..N {
            for j in 0..N {
                self.covariance[i][j] -= gained[i] * gained[j] / spread;
            }
        }
        // Forgetting inflates directions that nothing excites without end, until rounding leaves no valid covariance. So
        // it is done to the whole matrix, and only while no variance exceeds the prior's.
        if (0..N).all(|i| self.covariance[i][i] / self.forgetting <= self.most[i]) {
            self.covariance.iter_mut().flatten().for_each(|value| *value /= self.forgetting);
        }
    }

    /// The coefficients, none below 0: no part of a step takes negative time.
    pub fn coefficients(&self) -> [f64; N] {
        self.estimate.map(|coefficient| coefficient.max(0.0))
    }

    /// The prediction with those coefficients.
    pub fn predict(&self, features: &[f64; N]) -> f64 {
        self.coefficients().iter().zip(features).map(|(coefficient, feature)| coefficient * feature).sum()
    }

    fn raw(&self, features: &[f64; N]) -> f64 {
        self.estimate.iter().zip(features).map(|(coefficient, feature)| coefficient * feature).sum()
    }
}
