//! Recursive least squares with exponential forgetting and non-negative coefficients.

/// Number of initial observations that are never forgotten. The calibration chooses them to separate the
/// features, which later traffic may not do for hours: in pure decode the token count equals the sequence
/// count.
const PERMANENT_OBSERVATIONS: u32 = 32;
/// Permanent weight of each of these observations; a new observation has weight 1.
const PERMANENT_WEIGHT: f64 = 0.1;

/// Online least-squares fit of a linear model of `N` features, with exponential forgetting, a prior, and
/// coefficients of at least 0.
///
/// Keeps the normal equations (the information form of the recursion in Ljung, *System Identification*, 11.2)
/// and solves them after each observation, which takes well under a microsecond for few features. Unlike an
/// updated covariance, the matrix stays positive definite. Computes in `f64` and in fixed order, so that
/// equal observations give equal estimates on every machine.
#[derive(Debug, Clone)]
pub(crate) struct LeastSquares<const N: usize> {
    estimate: [f64; N],
    fading: NormalEquations<N>,
    permanent: NormalEquations<N>,
    forgetting: f64,
    observed: u32,
}

/// Normal equations, `matrix * estimate = moment`.
#[derive(Debug, Clone, Copy)]
struct NormalEquations<const N: usize> {
    matrix: [[f64; N]; N],
    moment: [f64; N],
}

impl<const N: usize> NormalEquations<N> {
    const ZERO: Self = Self { matrix: [[0.0; N]; N], moment: [0.0; N] };

    fn add(&mut self, features: &[f64; N], value: f64, weight: f64) {
        for i in 0..N {
            for j in 0..N {
                self.matrix[i][j] += weight * features[i] * features[j];
            }
            self.moment[i] += weight * features[i] * value;
        }
    }
}

impl<const N: usize> LeastSquares<N> {
    /// Starts from a prior estimate. `trust` is the prior's standard deviation relative to each value;
    /// `forgetting` in (0, 1] is the factor by which weights decay per observation.
    pub fn new(prior: [f64; N], trust: f64, forgetting: f64) -> Self {
        let mut permanent = NormalEquations::ZERO;
        for (i, value) in prior.iter().enumerate() {
            permanent.matrix[i][i] = (value.abs().max(1e-9) * trust).powi(-2);
            permanent.moment[i] = permanent.matrix[i][i] * value;
        }
        Self { estimate: prior, fading: NormalEquations::ZERO, permanent, forgetting, observed: 0 }
    }

    /// Adds one observation with the given noise variance; ignores non-finite values.
    pub fn observe(&mut self, features: &[f64; N], value: f64, noise: f64) {
        let weight = 1.0 / noise;
        if !(weight.is_finite() && weight > 0.0 && value.is_finite()) {
            return;
        }
        self.fading.matrix.iter_mut().flatten().for_each(|entry| *entry *= self.forgetting);
        self.fading.moment.iter_mut().for_each(|entry| *entry *= self.forgetting);
        self.fading.add(features, value, weight);
        if self.observed < PERMANENT_OBSERVATIONS {
            self.observed += 1;
            self.permanent.add(features, value, PERMANENT_WEIGHT * weight);
        }
        self.solve();
    }

    /// Returns the current coefficients, all at least 0.
    pub fn coefficients(&self) -> [f64; N] {
        self.estimate
    }

    /// Returns the predicted value for these features.
    pub fn predict(&self, features: &[f64; N]) -> f64 {
        self.estimate.iter().zip(features).map(|(coefficient, feature)| coefficient * feature).sum()
    }

    /// Solves under non-negativity with an active set: while a coefficient is negative, fixes the most
    /// negative one at 0 and solves for the others again, so that they absorb its contribution, which
    /// clamping would lose.
    fn solve(&mut self) {
        let mut fixed = [false; N];
        for _ in 0..=N {
            let Some(estimate) = self.solve_without(&fixed) else { return };
            // Coefficients have different units; compare their contributions to the observed values.
            let share = |i: usize| estimate[i] * self.fading.matrix[i][i].sqrt();
            match (0..N).filter(|i| estimate[*i] < 0.0).min_by(|a, b| share(*a).total_cmp(&share(*b))) {
                Some(lowest) => fixed[lowest] = true,
                None => {
                    self.estimate = estimate;
                    return;
                }
            }
        }
    }

    /// Solves by Cholesky factorization with the `fixed` coefficients at 0. Returns `None` if rounding made
    /// the matrix indefinite.
    fn solve_without(&self, fixed: &[bool; N]) -> Option<[f64; N]> {
        // Scaled to a unit diagonal: the features differ by eight orders of magnitude.
        let diagonal = |i: usize| self.fading.matrix[i][i] + self.permanent.matrix[i][i];
        let scale: [f64; N] = std::array::from_fn(|i| diagonal(i).sqrt().recip());
        let entry = |i: usize, j: usize| match fixed[i] || fixed[j] {
            true => f64::from(u8::from(i == j)),
            false => (self.fading.matrix[i][j] + self.permanent.matrix[i][j]) * scale[i] * scale[j],
        };
        let mut factor = [[0.0; N]; N];
        let mut solution = [0.0; N];
        for i in 0..N {
            for j in 0..=i {
                let sum = entry(i, j) - (0..j).map(|k| factor[i][k] * factor[j][k]).sum::<f64>();
                factor[i][j] = if i == j { sum.sqrt() } else { sum / factor[j][j] };
            }
            if !(factor[i][i].is_finite() && factor[i][i] > 0.0) {
                return None;
            }
            let moment = (self.fading.moment[i] + self.permanent.moment[i]) * scale[i];
            let moment = if fixed[i] { 0.0 } else { moment };
            solution[i] = (moment - (0..i).map(|k| factor[i][k] * solution[k]).sum::<f64>()) / factor[i][i];
        }
        for i in (0..N).rev() {
            let sum = solution[i] - (i + 1..N).map(|k| factor[k][i] * solution[k]).sum::<f64>();
            solution[i] = sum / factor[i][i];
        }
        Some(std::array::from_fn(|i| solution[i] * scale[i]))
    }
}
